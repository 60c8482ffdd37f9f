"""The pipeline file: what to capture, where to put it. Mistakes are named with their line and the accepted form."""

import difflib
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache, reduce
from itertools import combinations
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from cdc.config import mistakes
from cdc.config.mistakes import InvalidSetting
from cdc.config.references import replaced
from cdc.config.section import Section, Web
from cdc.config.server_settings import Connect, ConnectSettings, Kafka, KafkaSettings
from cdc.config.sink_kinds import SinkSettings, kinds
from cdc.config.source_settings import Source, TableSettings, matches, shared_names
from cdc.config.view_settings import SCHEMA, AnyView, ViewName, check_views
from cdc.config.view_settings import STATE as STATE_NAME
from cdc.errors import SettingsError
from cdc.model.login import Address
from cdc.model.table import Projection

NAME = r"^[a-z][a-z0-9_]{0,47}$"
SinkName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
SINKS = "Where the views are, by a name of your own."
STATE = """Where the rows are that documents are made from, as a sink's place: needed where there are
`views`. A server's database of its own.
"""


class NotifySettings(Section):
    """An address to which is posted when a finding opens and when it closes."""

    url: Web = Field(examples=["${SHOP_WEBHOOK}"])
    """Where it is posted."""
    severity: Literal["down", "degraded", "warning"] = "warning"
    """The least severity that is posted. A risk is a `warning`: it comes while there is time left."""
    after_s: float = Field(default=60.0, ge=0)
    """How long a finding has to be there before it opens, and to be gone before it closes."""


class ProofSettings(Section):
    """How `cdc run` compares rows with Postgres."""

    percent: float = Field(default=3.0, gt=0, le=100)
    """The share of a core that comparing rows may take, in percent."""
    sweep_hours: float = Field(default=24.0, gt=0)
    """How often all rows of a view are compared, changed or not: less often where `percent` is too little."""
    repair: bool = False
    """Whether rows that are wrong are sent through the log again, as by `cdc verify --repair`."""


NO_PROOF = ProofSettings.model_construct(percent=0.0)


def _proof(value: object) -> object:
    """YAML reads `off` as a truth value."""
    return NO_PROOF if value is False else value


class _Loader(yaml.SafeLoader):
    """Reads YAML, but for keys that YAML 1.1 takes for truth values: `on` is a name here."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


def read_tree(path: Path) -> tuple[str, dict[str, Any]]:
    """Read the file: its text, and its tree. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"The pipeline file {path} can't be read: {error.strerror}.",
            hint=f"name yours with: cdc -p FILE.yaml ...; a first one is written by: cdc -p {path} init",
        ) from None
    except UnicodeDecodeError:
        raise SettingsError(
            f"The pipeline file {path} isn't text in UTF-8.", hint=mistakes.INIT_HINT
        ) from None
    return text, _parse(path, text)


@lru_cache(maxsize=4)
def _parse(path: Path, text: str) -> dict[str, Any]:
    """Parse a text. Nobody changes the tree: a run reads its file every few seconds, which takes 0.4 ms a line."""
    try:
        tree = yaml.load(text, _Loader)  # noqa: S506  # a SafeLoader
    except yaml.YAMLError as error:
        raise mistakes.yaml_error(path, text, error) from None
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: a pipeline file is a mapping.", hint=mistakes.INIT_HINT)
    if duplicate := mistakes.duplicate_error(path, text):
        raise duplicate
    return tree


class Pipeline(Section):
    """One pipeline. Its name is also the slot, the publication, the topic prefix and the connector."""

    pipeline: str = Field(
        pattern=NAME,
        description="a letter and up to 47 lower case letters, digits and _",
        examples=["shop"],
    )
    source: Source
    """What is captured."""
    sinks: dict[SinkName, SinkSettings] = Field(min_length=1, description=SINKS)
    state: SinkSettings | None = Field(default=None, description=STATE)
    views: dict[ViewName, AnyView] = {}
    """Documents of several tables, by a name of your own."""
    kafka_settings: Kafka = Field(
        default=KafkaSettings(brokers="${CDC_KAFKA}"), alias="kafka", examples=["localhost:9092"]
    )
    """Kafka: a broker, host:port, or settings."""
    connect_settings: Connect = Field(
        default=ConnectSettings.model_construct(url="${CDC_CONNECT}"),
        alias="connect",
        examples=["http://localhost:8083"],
    )
    """Kafka Connect's REST interface: its URL, or settings."""
    staging: bool = False
    """Whether this is a staging system, which `cdc chaos` may break: it ends connections, kills processes and
    blocks writes. Never set it where people rely on the views.
    """
    proof: Annotated[ProofSettings, BeforeValidator(_proof)] = ProofSettings()
    """How rows are compared with Postgres during a run; `off`: not at all."""
    notify: tuple[NotifySettings, ...] = ()
    """Who is notified of trouble."""
    delete_retention_hours: float = Field(default=168.0, gt=0)
    """How long tombstones stay readable: must exceed the longest outage of a sink."""
    changes_retention_hours: float = Field(default=24.0, ge=0)
    """How long superseded records stay in the topics of tables and views of which a sink keeps every
    change: must exceed the longest outage of that sink.
    """
    on_error: Literal["quarantine", "stop"] = "quarantine"
    """What a sink does with a record that can't be decoded or held: put it aside and go on, or
    stop.
    """

    @field_validator("sinks")
    @classmethod
    def _check_sinks(
        cls, sinks: dict[str, SinkSettings], info: ValidationInfo
    ) -> dict[str, SinkSettings]:
        for first, second in combinations(sinks, 2):
            if sinks[first].place == sinks[second].place:
                raise InvalidSetting(
                    f"{first} and {second} are on one place, so each would overwrite what the other writes",
                    f"give {second} another {sinks[first].location_setting}, or take it out",
                )
        source = info.data.get("source")
        listed = [entry.table for entry in source.tables] if source else ["*"]
        for name, sink in sinks.items():
            sink.refuse_strangers(name, listed)
        if source:
            refuse_unknown(sinks, source.tables)
        return sinks

    @field_validator("state")
    @classmethod
    def _check_state(cls, state: SinkSettings | None, info: ValidationInfo) -> SinkSettings | None:
        if state is not None and state.tables is not None:
            raise InvalidSetting(
                "the state has the tables that views are made of",
                "take it out: `to` of a view says which sinks get its documents",
                ("tables",),
            )
        if state is not None:
            state.refuse_as_state()
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
        entries = info.data["source"].tables
        check_views(views, info.data["sinks"], entries)
        owners = {shared: entry.table for entry in entries for shared in shared_names(entry.table)}
        for name in views:
            for shared in shared_names(f"{SCHEMA}.{name}"):
                if shared in owners:
                    raise InvalidSetting(
                        f"{owners[shared]} has the same name in sinks and topics",
                        "give the view another name",
                        (name,),
                    )
        return views

    @model_validator(mode="after")
    def _check_emptiness(self) -> "Pipeline":
        for name, sink in self.sinks.items():
            if sink.tables == () and not any(name in view.to for view in self.views.values()):
                raise InvalidSetting(
                    "the sink gets nothing: no table, and no view has it in its `to`",
                    "list a table, or take the sink out",
                    ("sinks", name, "tables"),
                )
        return self

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any], folder: Path | None = None) -> "Pipeline":
        """A pipeline from a file's tree, whose sinks are checked by the settings of their kinds.

        Relative paths are relative to `folder`.

        Raises:
            ValidationError: of `file_model()`, whose fields show what would be accepted.
        """
        checked = file_model().model_validate(tree, context={"folder": folder} if folder else None)
        return cls.model_construct(checked.model_fields_set, **dict(checked))

    @property
    def kafka(self) -> Address:
        """The brokers, and how clients log in."""
        return self.kafka_settings.address

    @property
    def connect(self) -> Address:
        """Kafka Connect's REST interface, and how clients log in."""
        return self.connect_settings.address

    _listed: tuple[TableSettings, ...] | None = PrivateAttr(None)
    _file: tuple[Path, str] | None = PrivateAttr(None)

    def mistake(self, keys: Sequence[str], problem: str, hint: str) -> SettingsError:
        """The error for a setting that the database shows to be wrong, with its line in the file."""
        path, text = self._file or (Path("the pipeline file"), "")
        return mistakes.setting_error(path, text, keys, problem, hint)

    @property
    def listed(self) -> tuple[TableSettings, ...]:
        """The entries as the file has them, with patterns; `source.tables` may be the tables that these match."""
        return self.source.tables if self._listed is None else self._listed

    @property
    def patterns(self) -> list[TableSettings]:
        return [entry for entry in self.listed if entry.pattern]

    def with_tables(self, names: Iterable[str]) -> "Pipeline":
        """The same pipeline, with each pattern replaced by the tables in `names` that it matches."""
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
        return self._with_entries(entries)

    def without_tables(self, names: Collection[str]) -> "Pipeline":
        return self._with_entries(entry for entry in self.source.tables if entry.table not in names)

    def _with_entries(self, entries: Iterable[TableSettings]) -> "Pipeline":
        source = self.source.model_copy(update={"tables": tuple(entries)})
        changed = self.model_copy(update={"source": source})
        changed._listed = self.listed
        return changed

    def unlisted_by(self, table: str) -> tuple[str, ...]:
        """The sinks that have no view of a captured table: their `tables` don't list it."""
        return tuple(name for name, sink in self.sinks.items() if not sink.lists(table))

    def projections(self, table: str) -> dict[str, Projection]:
        """The columns that sinks have of a captured table, of sinks that don't have all, by sink."""
        found = {name: sink.projection(table) for name, sink in self.sinks.items()}
        return {name: projection for name, projection in found.items() if projection}

    def refuse_unknown_tables(self, unregistered: Sequence[TableSettings] = ()) -> None:
        """Raise SettingsError for what a sink lists and `source.tables` hasn't, once its patterns are
        replaced by tables. `unregistered`: patterns that may match other tables, which aren't
        registered yet.
        """
        try:
            refuse_unknown(self.sinks, self.source.tables, unregistered)
        except InvalidSetting as error:
            mistake = self.mistake(["sinks", *error.keys], str(error), error.hint)
            mistake.finding_key = "tables-undecided"
            raise mistake from None

    def changes_kept_s(self, sinks: Collection[str]) -> float:
        """How long superseded records have to stay, in seconds, in a topic that these sinks have views of."""
        keeps = any(sink.keeps_changes for name, sink in self.sinks.items() if name in sinks)
        return self.changes_retention_hours * 3600 if keeps else 0.0

    @property
    def replication_user(self) -> str:
        return self.source.replication_user or f"{self.pipeline}_replication"

    def topic(self, table: str) -> str:
        """The topic of a table, schema.table."""
        return f"{self.pipeline}.{table}"

    def view_topic(self, view: str) -> str:
        return self.topic(f"{SCHEMA}.{view}")

    @property
    def heartbeat_topic(self) -> str:
        return self.topic("cdc.heartbeat")

    @property
    def debezium_prefix(self) -> str:
        """The name of the connector's own heartbeat topic, up to its last dot. Like all topics it begins with
        the pipeline's name, by which rights are given.
        """
        return self.topic("cdc.debezium")

    @property
    def quarantine_topic(self) -> str:
        """The topic of records that can't be applied, see `cdc.quarantine`."""
        return f"{self.pipeline}.quarantine"

    @property
    def generations_topic(self) -> str:
        """The topic of the registry of generations, see `cdc.generations`."""
        return f"{self.pipeline}.generations"

    @property
    def runs_topic(self) -> str:
        """The topic of the progress of runs, see `cdc.observe.run_log`."""
        return f"{self.pipeline}.runs"

    @property
    def operations_topic(self) -> str:
        """The topic of the operation log, see `cdc.control.operations`."""
        return f"{self.pipeline}.operations"

    @property
    def message_topic(self) -> str:
        """The topic of logical messages, see `cdc.client`."""
        return f"{self.pipeline}.message"

    @property
    def registered_topic(self) -> str:
        """The topic of registrations, see `cdc.control.registrations`."""
        return f"{self.pipeline}.registered"

    @property
    def settings_topic(self) -> str:
        """The topic of the ledger: settings to restore, compactions, holes. See `cdc.kafka.ledger`."""
        return f"{self.pipeline}.settings"


def refuse_unknown(
    sinks: Mapping[str, SinkSettings],
    captured: Sequence[TableSettings],
    unregistered: Sequence[TableSettings] = (),
) -> None:
    """Raise InvalidSetting for a name or a pattern in a sink's `tables` that means nothing captured. A
    pattern that may mean what another one does passes. See `Pipeline.refuse_unknown_tables`.
    """
    known = [entry.table for entry in captured]
    for name, sink in sinks.items():
        for number, listed in enumerate(sink.tables or ()):
            if _may_mean(listed.table, captured):
                continue
            problem = (
                "the pattern matches nothing of source.tables"
                if "*" in listed.table
                else "the table isn't captured"
            )
            near = difflib.get_close_matches(listed.table, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"list one of: {', '.join(known)}"
            if _may_mean(listed.table, unregistered):
                register = "cdc -p FILE migrate, then cdc -p FILE register"
                hint = f"if it is new: {register}; if not, {hint}"
            elif not near:
                hint = f"add it to source.tables, or {hint}"
            raise InvalidSetting(problem, hint, (name, "tables", str(number)))


def _may_mean(listed: str, entries: Sequence[TableSettings]) -> bool:
    """Whether a name or a pattern in a sink's `tables` may mean a table that an entry means."""
    if "*" in listed:
        return any(entry.pattern or matches(listed, entry.table) for entry in entries)
    return any(entry.matches(listed) for entry in entries)


def load(path: Path, environment: Mapping[str, str] | None = None) -> Pipeline:
    """Read and check a pipeline file, with `${NAME}` replaced from the environment.

    Raises:
        SettingsError: naming the file, the line and the accepted form.
    """
    text, tree = read_tree(path)
    resolved, unresolved = replaced(
        {"kafka": "${CDC_KAFKA}", "connect": "${CDC_CONNECT}", **tree},
        os.environ if environment is None else environment,
    )
    if unresolved:
        raise mistakes.reference_error(path, text, unresolved[0])
    try:
        pipeline = Pipeline.from_tree(resolved, path.absolute().parent)
    except ValidationError as error:
        raise mistakes.validation_error(path, text, error, file_model()) from None
    pipeline._file = (path, text)
    return pipeline


@cache
def file_model() -> type[Pipeline]:
    """The model of a file with the installed kinds of sinks, which are known only when a file is read."""
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
