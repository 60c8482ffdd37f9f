"""operate/runbooks/index.md: every code of a finding, as the catalogue has it."""

from collections.abc import Iterable

from cdc.model.finding import ORDER
from cdc.model.finding_codes import CODES, KINDS, code_of

HEAD = """\
# Runbooks

`cdc status` and `cdc doctor` show each finding with its code in brackets. Each code has a page here: what the finding
means, what to look at, what to type, and how you know it is over.

In commands, replace `shop.yaml` with your pipeline file and `cache` with the sink; the `fix` of a finding already has
the right names. `redis-cli` without options connects to this machine: add `-h HOST -p PORT` from the sink's `url`, as
`doctor` does in its `fix`. Run SQL statements with `psql`, as the owner of the source.

Codes are stable: a code never gets another meaning. The exit code of `status` and `doctor` is the worst finding's
above `info`. The last column says what happens if nobody acts. The table is made from the code by
`python -m docs.generate`; a test compares them.

| code | severity | hop | exit code | if nobody acts |
|---|---|---|---|---|
"""
MOST = 3
"""The most consequences of a code that a row lists."""


def page() -> str:
    """Return the whole text."""
    return HEAD + "".join(f"{_row(code)}\n" for code in CODES)


def _row(code: str) -> str:
    kinds = [kind for key, kind in KINDS.items() if code_of(key) == code]
    whys = list(dict.fromkeys(kind.why for kind in kinds))
    cells = (
        f"[{code}]({code}.md)",
        _listed(sorted((kind.severity for kind in kinds), key=ORDER.index)),
        _listed(kind.hop.replace("SINK", "sink") for kind in kinds),
        _listed(str(kind.failure.exit_code) for kind in kinds),
        " Or: ".join(whys) if len(whys) <= MOST else "Its page says it for each case.",
    )
    return f"| {' | '.join(cells)} |"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
