"""Findings of `cdc topics audit`: what a view that is made from the log would lack or have wrong."""

from collections.abc import Mapping

from cdc.errors import DecodeError, DivergenceError
from cdc.model.finding_codes.kind import APPLY, LOG, Kind

AUDIT: Mapping[str, Kind] = {
    "values-lost": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would lack these values; live views have them.",
    ),
    "rows-outdated": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would show these rows as before the definition changed.",
    ),
    "keys-moved": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "An older change of these rows may win in a view that is made from the log.",
    ),
    "records-keyless": Kind(
        "degraded", LOG, DivergenceError, "A view that is made from the log would lack these rows."
    ),
    "records-foreign": Kind(
        "degraded",
        LOG,
        DivergenceError,
        "A view that is made from the log would have rows under keys that are nobody's.",
    ),
    "records-unreadable": Kind(
        "warning", LOG, DecodeError, "A rebuild puts these records into quarantine."
    ),
    "changes-incomplete": Kind(
        "warning", APPLY, DivergenceError, "Queries of the log of changes may miss some of them."
    ),
}
"""What only `cdc topics audit` can find, besides some of the above."""
