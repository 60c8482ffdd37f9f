"""The pipeline file: what to capture, where to put it. Wrong input is named with its line and the
accepted form.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
)

from cdc.config import mistakes, places
from cdc.config.mistakes import InvalidSetting
from cdc.config.notify_settings import NotifySettings
from cdc.config.references import References
from cdc.config.section import Web
from cdc.config.sink_kinds import SinkSettings, kinds
from cdc.config.source_settings import Source, TableSettings, shared_names
from cdc.config.topic_names import NAME, TopicNames
from cdc.config.view_settings import SCHEMA, AnyView, ViewName, check_views
from cdc.config.view_settings import STATE as STATE_NAME
from cdc.config.yaml_file import read_tree
from cdc.errors import SettingsError

SinkName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
SINKS = "Where the views are, by a name of your own."
STATE = """Where the rows are that documents are made from, as a sink's place: needed where there are
`views`. A server's database of its own.
"""


class Pipeline(TopicNames):
    """One pipeline. Its name is also the slot, the publication, the topic prefix and the
    connector.
    """

    source: Source
    """What is captured."""
    sinks: dict[SinkName, SinkSettings] = Field(min_length=1, description=SINKS)
    state: SinkSettings | None = Field(default=None, description=STATE)
    views: dict[ViewName, AnyView] = {}
    """Documents of several tables, by a name of your own."""
    kafka: str = Field(default="${CDC_KAFKA}", examples=["localhost:9092"])
    """A broker, host:port."""
    connect: Web = Field(default="${CDC_CONNECT}", examples=["http://localhost:8083"])
    """Kafka Connect's REST interface."""
    notify: tuple[NotifySettings, ...] = ()
    """Who is told of trouble."""
    delete_retention_hours: float = Field(default=168.0, gt=0)
    """How long tombstones stay readable: must exceed the longest outage of a sink."""
    changes_retention_hours: float = Field(default=24.0, ge=0)
    """How long superseded records stay in the topics of a pipeline whose sinks keep every change:
    must exceed the longest outage of these.
    """
    on_error: Literal["quarantine", "stop"] = "quarantine"
    """What a sink does with a record that can't be decoded or held: put it aside and go on, or
    stop.
    """

    @field_validator("sinks")
    @classmethod
    def _check_locations(cls, sinks: dict[str, SinkSettings]) -> dict[str, SinkSettings]:
        if pair := places.first_shared({name: sink.place for name, sink in sinks.items()}):
            raise InvalidSetting(
                f"{pair[0]} and {pair[1]} are on one place, so each would overwrite what the other writes",
                f"give {pair[1]} another {sinks[pair[0]].location_setting}, or take it out",
            )
        return sinks

    @field_validator("sinks")
    @classmethod
    def _check_tables(
        cls, sinks: dict[str, SinkSettings], info: ValidationInfo
    ) -> dict[str, SinkSettings]:
        listed = (
            [entry.table for entry in info.data["source"].tables]
            if "source" in info.data
            else ["*"]
        )
        for name, sink in sinks.items():
            sink.refuse_strangers(name, listed)
        return sinks

    @field_validator("state")
    @classmethod
    def _check_state(cls, state: SinkSettings | None, info: ValidationInfo) -> SinkSettings | None:
        for name, sink in info.data.get("sinks", {}).items():
            if state is not None and not state.territory.isdisjoint(sink.territory):
                raise InvalidSetting(
                    f"the state is where {name} has its views or makes the next ones",
                    f"give it a place of its own: another {state.territory_setting}",
                )
        return state

    @field_validator("views")
    @classmethod
    def _check_views(cls, views: dict[str, AnyView], info: ValidationInfo) -> dict[str, AnyView]:
        if not info.data.keys() >= {"source", "sinks", "state"}:
            return views
        if views and info.data["state"] is None:
            raise InvalidSetting(
                "views need a state, the rows that documents are made from",
                "for example: state: {type: redis, url: redis://localhost:6379/2, prefix: shop}",
            )
        if views and STATE_NAME in info.data["sinks"]:
            raise InvalidSetting(
                f"what keeps documents is called {STATE_NAME}, and a sink has that name",
                "give the sink another name",
            )
        tables = [entry.table for entry in info.data["source"].tables]
        check_views(views, info.data["sinks"], tables)
        owners = {shared: table for table in tables for shared in shared_names(table)}
        for name in views:
            for shared in shared_names(f"{SCHEMA}.{name}"):
                if shared in owners:
                    raise InvalidSetting(
                        f"{owners[shared]} has the same name in sinks and topics",
                        "give the view another name",
                        (name,),
                    )
        return views

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], folder: Path | None = None) -> "Pipeline":
        """A pipeline from a file's tree, whose sinks are checked by the settings of their kinds.

        Relative paths are relative to `folder`.

        Raises:
            ValidationError: of `file_model()`, whose fields tell what would be accepted.
        """
        checked = file_model().model_validate(tree, context={"folder": folder} if folder else None)
        values = {name: getattr(checked, name) for name in cls.model_fields}
        return cls.model_construct(checked.model_fields_set, **values)

    _listed: tuple[TableSettings, ...] | None = PrivateAttr(None)
    _file: tuple[Path, str] | None = PrivateAttr(None)

    def mistake(self, keys: Sequence[str], problem: str, hint: str) -> SettingsError:
        """The error for a setting that the database shows to be wrong, with its line in the
        file.
        """
        path, text = self._file or (Path("the pipeline file"), "")
        return mistakes.setting_error(path, text, keys, problem, hint)

    @property
    def listed(self) -> tuple[TableSettings, ...]:
        """The entries as the file has them, patterns included; `source.tables` may be the tables
        that these match.
        """
        return self.source.tables if self._listed is None else self._listed

    @property
    def patterns(self) -> list[TableSettings]:
        """The patterns among the entries of the file."""
        return [entry for entry in self.listed if entry.pattern]

    def with_tables(self, names: Iterable[str]) -> "Pipeline":
        """The same pipeline, with each pattern replaced by those of these tables that it
        matches.
        """
        candidates = list(names)
        used = {entry.table for entry in self.listed if not entry.pattern}
        entries: list[TableSettings] = []
        for entry in self.listed:
            if not entry.pattern:
                entries.append(entry)
                continue
            matches = [name for name in candidates if name not in used and entry.matches(name)]
            used.update(matches)
            entries += [entry.model_copy(update={"table": name}) for name in matches]
        resolved = self.model_copy(
            update={"source": self.source.model_copy(update={"tables": tuple(entries)})}
        )
        resolved._listed = self.listed
        return resolved

    def without_tables(self, names: Collection[str]) -> "Pipeline":
        """This pipeline without these tables."""
        tables = tuple(entry for entry in self.source.tables if entry.table not in names)
        narrowed = self.model_copy(
            update={"source": self.source.model_copy(update={"tables": tables})}
        )
        narrowed._listed = self.listed
        return narrowed

    @property
    def changes_kept_s(self) -> float:
        """How long superseded records have to stay in the topics of tables, in seconds."""
        keeps = any(sink.keeps_changes for sink in self.sinks.values())
        return self.changes_retention_hours * 3600 if keeps else 0.0

    @property
    def replication_user(self) -> str:
        """The role that the connector logs in with."""
        return self.source.replication_user or f"{self.pipeline}_replication"


def load(path: Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Read and check a pipeline file, with `${NAME}` replaced from the environment.

    Raises:
        SettingsError: naming the file, the line and the accepted form.
    """
    text, tree = read_tree(path)
    references = References(os.environ if environment is None else environment)
    resolved = references.replace_in({"kafka": "${CDC_KAFKA}", "connect": "${CDC_CONNECT}", **tree})
    if references.unresolved:
        raise mistakes.reference_error(path, text, references.unresolved[0])
    try:
        pipeline = Pipeline.from_tree(resolved, path.absolute().parent)
    except ValidationError as error:
        raise mistakes.validation_error(path, text, error, file_model()) from None
    pipeline._file = (path, text)
    return pipeline


@cache
def file_model() -> type[Pipeline]:
    """The model of a pipeline file with the installed kinds of sinks, which are known only when a
    file is read.
    """
    installed = kinds()
    sink: Any = _any_of(installed)
    state: Any = _any_of([kind for kind in installed if kind.holds_state]) | None
    return create_model(
        "Pipeline",
        __base__=Pipeline,
        sinks=(dict[SinkName, sink], Field(min_length=1, description=SINKS)),
        state=(state, Field(default=None, description=STATE)),
    )


def _any_of(classes: Sequence[type[SinkSettings]]) -> Any:
    """The type of a section that one of these classes reads, by its `type`."""
    if len(classes) < 2:
        return classes[0] if classes else SinkSettings
    return Annotated[reduce(or_, classes), Field(discriminator="type")]


def name_of(path: Path) -> str:
    """The pipeline's name alone, readable before any server runs."""
    _, tree = read_tree(path)
    name = tree.get("pipeline")
    if not isinstance(name, str) or not re.match(NAME, name):
        raise SettingsError(
            f"{path}: `pipeline` must be a name of lower case letters, digits and _.",
            hint="for example: pipeline: shop",
        )
    return name
