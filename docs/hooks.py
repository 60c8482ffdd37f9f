"""Hooks of mkdocs: they add the bench's plots, which lie outside this folder, beside the numbers
that they are made of.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

PLOTS = Path(__file__).parents[1] / "bench" / "results"
LINK = "](../../bench/results/"


def on_files(files: Any, *, config: Any) -> Any:
    """Add the plots to the site."""
    for plot in sorted(PLOTS.glob("*.png")):
        files.append(File.generated(config, f"performance/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point to the plots where they lie in the site, as the page does to where they lie in the
    repository.
    """
    return markdown.replace(LINK, "](")
