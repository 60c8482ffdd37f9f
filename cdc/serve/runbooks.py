"""The runbooks as the page shows them: the same texts as in the documentation."""

import re
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

from cdc.model.finding_codes import CODES

FOLDER = Path(__file__).parent / "runbooks"
LINK = re.compile(r'href="([a-z-]+)\.md"')


@cache
def runbook(code: str) -> str | None:
    """Return the runbook of a finding's code as HTML; None where there is none."""
    path = FOLDER / f"{code}.md"
    if code not in CODES or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return LINK.sub(r'href="/runbooks/\1"', str(html)).replace("<pre>", '<pre tabindex="0">')
