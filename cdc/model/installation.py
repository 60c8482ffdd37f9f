"""This installation: the command that completes it with an extra.

The package is on no index: `cdc` there is somebody else's.
"""

import json
import shlex
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Make the command that installs an extra into this environment, from where pip has taken `cdc`:
    a clone, a wheel, a URL. Where that isn't recorded or no longer there, from the clone in which
    the command is run.
    """
    try:
        recorded = Distribution.from_name("cdc").read_text("direct_url.json")
    except PackageNotFoundError:
        recorded = None
    options, source = _source(json.loads(recorded or "{}"), extra)
    return shlex.join([sys.executable, "-m", "pip", "install", *options, source])


def _source(origin: dict[str, Any], extra: str) -> tuple[list[str], str]:
    """Name what pip installs, with its options. `origin`: a record as in PEP 610, or empty."""
    url = origin.get("url", "")
    if url and not url.startswith("file:"):
        system = origin.get("vcs_info", {}).get("vcs")
        return [], f"cdc[{extra}] @ {f'{system}+' if system else ''}{url}"
    path = Path(unquote(urlsplit(url).path))
    if not url or not path.exists():
        return [], f".[{extra}]"
    editable = origin.get("dir_info", {}).get("editable", False)
    return (["-e"] if editable else []), f"{path}[{extra}]"
