"""Find the kinds of sinks that a pipeline file may name. Each brings its settings, by an entry
point.

In:  the entry points of the group `cdc.sinks`, of any installed package: a class of settings each,
or a tuple of them. Out: the classes. To add a sink is to write one, with `build`, and to name it in
an entry point.
"""

from collections.abc import Hashable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Section
from cdc.config.source_settings import TABLE, by_name, check_pattern, matches
from cdc.errors import SettingsError
from cdc.model.column_names import PIPELINE_PREFIX
from cdc.model.table import Projection

GROUP = "cdc.sinks"
TRIGGER = (
    "The seconds between the starts of two batches. Up to 2 s they start at multiples of it, so that sinks"
    " with the same interval can share a small batch. While 10,000 changes or more wait, the next batch"
    " starts at once."
)
"""The description of `trigger_s`, the same for every kind."""


class ListedTable(Section):
    """An entry of a sink's `tables`: captured tables that the sink has views of."""

    table: str = Field(pattern=TABLE, description="schema.table")
    columns: tuple[str, ...] | None = None
    """The columns that the sink has, beside the key; all of them without it."""
    exclude: tuple[str, ...] = ()
    """Columns that the sink doesn't have."""
    rename: dict[str, str] = Field(default={}, examples=["{amount: total}"])
    """Names that the sink has for columns, by the table's own. A row's id stays what it is."""
    where: str | None = Field(default=None, min_length=1, examples=["deleted_at IS NULL"])
    """The condition of the rows that the sink has, in the language of a view's conditions. It may read columns
    that the sink doesn't have."""

    @field_validator("table")
    @classmethod
    def _check_pattern(cls, table: str) -> str:
        return check_pattern(table)

    @model_validator(mode="after")
    def _check_columns(self) -> "ListedTable":
        settings = [name for name in type(self).model_fields if name != "table"]
        given = [name for name in settings if name in self.model_fields_set]
        if "*" in self.table and given:
            raise InvalidSetting(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} a single table's, not a pattern's",
                f"list that table as well: [{self.table}, {{table: schema.table, {given[0]}: ...}}]",
            )
        if self.columns is not None and self.exclude:
            raise InvalidSetting(
                "columns and exclude say the same in two ways", "write only one of them"
            )
        return self

    @field_validator("rename")
    @classmethod
    def _check_rename(cls, rename: dict[str, str]) -> dict[str, str]:
        for column, name in rename.items():
            if not name or name.lower().startswith(PIPELINE_PREFIX):
                raise InvalidSetting(
                    f"a name isn't empty and doesn't begin with {PIPELINE_PREFIX}, as the pipeline's own do",
                    f"for example: {{{column}: total}}",
                    (column,),
                )
        return rename

    @property
    def projection(self) -> Projection | None:
        """What the sink has of the table; None for all of it, by its own names."""
        rename = {column: name for column, name in self.rename.items() if name != column}
        if self.columns is None and not self.exclude and not rename and not self.where:
            return None
        return Projection(self.columns, self.exclude, rename, self.where)


class SinkSettings(Section):
    """The settings of one sink. Each kind has a `type`, a literal that no other has, and a `trigger_s`."""

    keeps_changes: ClassVar[bool] = False
    """Whether the sink keeps every change, not only the current rows."""
    executor: ClassVar[str] = ""
    """The module that Spark's workers run, if it is to be imported once for all of them."""
    location_setting: ClassVar[str]
    """The setting to change if two sinks have the same location."""
    holds_state: ClassVar[bool] = False
    """Whether the file's `state` can be of this kind."""
    territory_setting: ClassVar[str] = ""
    """The setting to change if a state's territory is a sink's, too."""

    tables: tuple[Annotated[ListedTable, by_name], ...] | None = Field(
        default=None, examples=["[public.orders]"]
    )
    """The captured tables that the sink has views of: names, or patterns like `public.*`. Without it the sink
    has all of them. Documents of `views` go where their `to` says, whatever this lists."""

    if TYPE_CHECKING:
        type: str
        trigger_s: float

    @property
    def place(self) -> Hashable:
        """The location of the views, as the settings give it.

        Equal for two sinks that would overwrite each other's views.
        """
        raise NotImplementedError

    @property
    def territory(self) -> frozenset[Hashable]:
        """All that the sink may empty or replace: a state can't lie there."""
        return frozenset([self.place])

    def lists(self, table: str) -> bool:
        """Whether the sink has a view of a captured table."""
        return self.tables is None or any(matches(entry.table, table) for entry in self.tables)

    def projection(self, table: str) -> Projection | None:
        """What the sink has of a captured table; None for all of it, by its own names."""
        entries = (entry for entry in self.tables or () if entry.table == table)
        return next((entry.projection for entry in entries), None)

    @field_validator("tables")
    @classmethod
    def _check_tables(
        cls, tables: tuple[ListedTable, ...] | None
    ) -> tuple[ListedTable, ...] | None:
        names = [entry.table for entry in tables or ()]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise InvalidSetting(f"listed twice: {', '.join(duplicates)}", "take one of them out")
        return tables

    def refuse_strangers(self, name: str, listed: Sequence[str]) -> None:
        """Raise InvalidSetting for a table that the settings of sink `name` have and `source.tables` hasn't."""

    def build(self, name: str, pipeline: str) -> Any:
        """The sink, a `cdc.sink.contract.Sink`. Its client is imported only here: a file is read without it."""
        raise NotImplementedError

    def refuse_as_state(self) -> None:
        """Raise InvalidSetting if the state can't be where these settings say."""

    def build_state(self) -> Any:
        """The state of the pipeline's documents, a `cdc.documents.state.StateSink`."""
        raise NotImplementedError


@cache
def kinds() -> tuple[type[SinkSettings], ...]:
    """The settings classes of all installed kinds.

    Raises:
        SettingsError: there is none, for this package itself isn't installed, or was before it had
            entry points.
    """
    classes: list[type[SinkSettings]] = []
    for entry in entry_points(group=GROUP):
        loaded = entry.load()
        classes += loaded if isinstance(loaded, tuple) else [loaded]
    if not classes:
        raise SettingsError(
            "No kind of sink is installed.", hint="install this package again: make clean setup"
        )
    return tuple(classes)
