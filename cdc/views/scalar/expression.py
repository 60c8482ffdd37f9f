"""Scalar expressions over one row, written in SQL: evaluated here by Python, and by Postgres in the
query that a view is verified with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cdc.views.scalar.operators import Evaluate, evaluator
from cdc.views.scalar.terms import Term


@dataclass(frozen=True)
class Expression:
    """An expression over the columns of one table.

    text     its normal form: the name of the column if it is nothing else
    columns  names of the columns that it reads
    term     what it computes; None if it is a column
    """

    text: str
    columns: tuple[str, ...]
    term: Term | None = None

    def evaluate(self, row: Mapping[str, Any]) -> Any:
        """Evaluate over a row's values in the document form, as `msgspec.json` decodes them, with
        Decimal for numbers with a fraction. NULL is None, in and out.
        """
        return row[self.text] if self.term is None else self._evaluate(row)

    @cached_property
    def _evaluate(self) -> Evaluate:
        assert self.term is not None
        return evaluator(self.term)

    def __getstate__(self) -> dict[str, Any]:
        # The function can't be pickled; each process makes its own.
        return {"text": self.text, "columns": self.columns, "term": self.term}
