"""Scalar expressions over one row, written in SQL: evaluated here by Python, and by Postgres in the
query that a view is verified with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Expression:
    """An expression over the columns of one table.

    text     its normal form: the name of the column if it is nothing else
    columns  names of the columns that it reads
    """

    text: str
    columns: tuple[str, ...]

    def evaluate(self, row: Mapping[str, Any]) -> Any:
        """Evaluate over a row's values in the document form, as `msgspec.json` decodes them, with
        Decimal for numbers with a fraction. NULL is None, in and out.
        """
        return row[self.text]
