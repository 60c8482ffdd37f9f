"""Settings of the source: the database, and which of its tables are captured."""

import json
import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from cdc.config.mistakes import InvalidSetting
from cdc.config.section import Section
from cdc.model.mask import Mask
from cdc.model.table import IndexOptions

RESERVED_SETTINGS = (
    *("gc_deletes.", "blocks.", "mode.", "mapping.source.", "default_pipeline.", "final_pipeline."),
    # A row that isn't on disk when its position is would be lost with the node, and nobody would
    # send it again.
    "translog.",
)
"""Settings that a file can't change: documents would differ from what was sent, or late bulks be accepted."""
RESERVED_TYPES = {
    "alias": "it takes no value",
    "semantic_text": "the server may write more into the documents than was sent",
}
"""Types of fields that a column can't have."""
TABLE = r"^[^.]+\.[^.]+$"
TOPIC_CHARACTERS = r"[A-Za-z0-9_-]+"
"""Characters that a topic's name can have; the connector would replace any other by _."""


def _plain(tree: object) -> object:
    """The tree as JSON: YAML turns a text that looks like a date into one."""
    return json.loads(json.dumps(tree, default=str))


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by their full names, however they are nested."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, dict) else {"": value}
        flat |= {f"{name}.{suffix}".rstrip("."): setting for suffix, setting in inner.items()}
    return flat


def _index_fields(fields: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    if "_source" in fields:
        raise InvalidSetting(
            "_source can't be set, for the view wouldn't be sure to be right", "take it out"
        )
    for name, field in fields.items():
        if not isinstance(field.get("fields", {}), dict):
            raise InvalidSetting(
                f"sub-fields of {name} are settings by name",
                "for example: fields: {raw: {type: keyword}}",
            )
        if reason := RESERVED_TYPES.get(str(field.get("type"))):
            raise InvalidSetting(f"{name} can't be {field['type']}: {reason}", "take another type")
        strict = [
            option
            for option, value in _flat(field).items()
            if f".{option}".endswith(".dynamic") and str(value).startswith("strict")
        ]
        if strict:
            raise InvalidSetting(
                f"{strict[0]} of {name} can't be strict: rows would be refused for a member",
                "write dynamic: false, which leaves new members out of the search",
            )
    return fields


def _index_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an index by their full names, without `index.`."""
    flat = {name.removeprefix("index."): value for name, value in _flat(settings).items()}
    if reserved := [name for name in flat if f"{name}.".startswith(RESERVED_SETTINGS)]:
        raise InvalidSetting(
            f"{reserved[0]} can't be set, for the view wouldn't be sure to be right", "take it out"
        )
    for name in ("number_of_shards", "number_of_replicas"):
        if name in flat and not str(flat[name]).isdecimal():
            raise InvalidSetting(f"{name} is a whole number", f"for example: {name}: 1")
    return flat


def check_pattern(table: str) -> str:
    """Return a table's name, or a pattern of such names that can be used. Raises InvalidSetting."""
    if "*" in table and not re.fullmatch(r"[A-Za-z0-9_*-]+\.[A-Za-z0-9_*-]+", table):
        raise InvalidSetting(
            "a pattern has letters, digits, _, - and * only", "for example: public.*"
        )
    return table


def matches(pattern: str, table: str) -> bool:
    """Whether a table has this name, or one that a pattern matches."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), table) is not None


def _mask(value: object) -> Mask:
    """The mask that the file writes as `redact`, `{hash: SALT}` or `{cut: 20}`. Raises InvalidSetting."""
    if isinstance(value, Mask):
        return value
    if value == "redact":
        return Mask(redact=True)
    match value:
        case {"cut": int(length), **others} if not others and length > 0 and length is not True:
            return Mask(cut=length)
        case {"hash": str(salt), **others} if not others:
            # The connector has the salt in the name of a setting, where Connect resolves no reference.
            if not re.fullmatch(r"[A-Za-z0-9_-]+", salt):
                raise InvalidSetting(
                    "the salt of a hash has letters, digits, _ and - only, and can't be a reference to a file:"
                    " whoever may read the connector's settings reads it",
                    "for example: {hash: shop-2026}; for values that nobody may find out: redact, or exclude",
                )
            return Mask(hash=salt)
    raise InvalidSetting("no such mask", "one of: redact, {hash: SALT}, {cut: 20}")


class IndexSettings(Section):
    """The search index of a table, as far as the types of its columns don't decide it."""

    fields: Annotated[
        dict[str, dict[str, Any]], AfterValidator(_plain), AfterValidator(_index_fields)
    ] = Field(default={}, examples=["{name: {analyzer: simple}}"])
    """Fields by column: with a `type` as they are, without one as additions to the type's own."""
    analysis: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default={}, examples=["{analyzer: {words: {tokenizer: standard, filter: [lowercase]}}}"]
    )
    """Analyzers, tokenizers, filters and normalizers that the fields name, in Elasticsearch's own words."""
    settings: Annotated[dict[str, Any], AfterValidator(_plain), AfterValidator(_index_settings)] = (
        Field(default={}, examples=["{number_of_shards: 3}"])
    )
    """Settings of the index in Elasticsearch's own words."""

    @model_validator(mode="after")
    def _check_analysis(self) -> "IndexSettings":
        if self.analysis and any(name.startswith("analysis.") for name in self.settings):
            raise InvalidSetting("has an analysis in two places", "write it under analysis alone")
        return self

    @property
    def options(self) -> IndexOptions:
        """What a table's index is made with."""
        analysis = _flat({"analysis": self.analysis}) if self.analysis else {}
        return IndexOptions(self.fields, {**self.settings, **analysis})


class TableSettings(Section):
    """An entry of `source.tables`: a table or a pattern."""

    table: str = Field(pattern=TABLE, description="schema.table")
    partitions: int = Field(default=4, ge=1, le=1000)
    """Of the table's topic: as many tasks can work on it at once. To change the number later,
    recreate the topic.
    """
    exclude: tuple[str, ...] = ()
    """Columns that no view has, and no topic."""
    mask: dict[str, Annotated[Mask, BeforeValidator(_mask)]] = Field(
        default={}, examples=["{email: {hash: shop-2026}, note: {cut: 20}, ssn: redact}"]
    )
    """Columns of text whose values the connector changes before they are in a topic: `redact`, `{hash: SALT}` or
    `{cut: 20}`.
    """
    key: tuple[str, ...] = ()
    """Columns that identify a row where there is no primary key: the columns of a unique index,
    none of them nullable.
    """
    events: bool = False
    """Whether the rows are events: inserted, and never changed. A DELETE or TRUNCATE takes none of them
    from the views, and `cdc migrate` makes Postgres refuse an UPDATE.
    """
    index: IndexSettings = IndexSettings()
    """How the table's search index is made."""

    @field_validator("table")
    @classmethod
    def _check_pattern(cls, table: str) -> str:
        return check_pattern(table)

    @model_validator(mode="after")
    def _check_options(self) -> "TableSettings":
        if self.pattern and (self.exclude or self.mask or self.key or self.index.fields):
            raise InvalidSetting(
                "exclude, mask, key and index.fields are a single table's, not a pattern's",
                f"list that table as well: [{self.table}, {{table: schema.table, exclude: [column]}}]",
            )
        for column in self.mask:
            if column in self.exclude:
                raise InvalidSetting(
                    f"{column} is excluded, so there is nothing to mask",
                    f"take {column} out of exclude or out of mask",
                )
            if column in self.key:
                raise InvalidSetting(
                    f"{column} is part of the key, which the connector can't mask",
                    f"take {column} out of mask, or choose another key",
                )
        return self

    @property
    def pattern(self) -> bool:
        return "*" in self.table

    def matches(self, table: str) -> bool:
        """Whether the pattern matches; `*` stands for any characters of a schema's or a table's name."""
        return matches(self.table, table)


def shared_names(table: str) -> tuple[str, str]:
    """Names that two tables can't share: of an index, and of a topic in the broker's metrics."""
    return f"index {table.lower()}", f"topic {table.replace('.', '_')}"


by_name = BeforeValidator(lambda value: {"table": value} if isinstance(value, str) else value)
"""Takes a table's name for an entry without other settings."""
Entry = Annotated[TableSettings, by_name]


class ConnectorCertificate(Section):
    """The certificate with which the connector logs in. Files of the machine of Kafka Connect, in PEM."""

    certificate: str = Field(examples=["/etc/cdc/shop_replication.pem"])
    """The certificate, for the role in `replication_user`."""
    key: str = Field(examples=["/etc/cdc/shop_replication-key.pem"])
    """Its key: RSA, in PKCS#8 without a password, in a file that nobody else may read."""


class Source(Section):
    """The database, and what is captured of it."""

    dsn: str = Field(repr=False, examples=["postgresql://owner:password@localhost/shop"])
    """The database, as the owner of the tables logs in."""
    reader: str | None = Field(
        default=None, repr=False, examples=["postgresql://reader:password@localhost/shop"]
    )
    """The login of everything but `migrate`, `register` and `destroy`: a role that changes nothing in
    the source. `cdc migrate` grants it what it needs. Without it `dsn` serves.
    """
    tables: tuple[Entry, ...] = Field(min_length=1)
    """Names, patterns like `public.*`, or entries with settings of their own."""
    replication_user: str | None = None
    """How the connector logs in: `<pipeline>_replication` when nothing is said. `cdc migrate` makes
    the role.
    """
    replication_password: SecretStr | None = None
    """The password of that role; needless where Postgres trusts the connector's address."""
    replication_certificate: ConnectorCertificate | None = None
    """The connector's client certificate, if Postgres asks for one. The certificate in `dsn` is the owner's,
    and isn't sent to Connect.
    """
    heartbeat_s: float = Field(default=2.0, gt=0)
    """Seconds between two heartbeats of the connector, by which an idle database's lag is known."""

    @property
    def reader_dsn(self) -> str:
        return self.reader or self.dsn

    @field_validator("tables")
    @classmethod
    def _check_names(cls, tables: tuple[TableSettings, ...]) -> tuple[TableSettings, ...]:
        names = [entry.table for entry in tables if not entry.pattern]
        rename = "rename the table (ALTER TABLE ... RENAME TO ...), or take it out of source.tables"
        if invalid := [
            name
            for name in names
            if not all(re.fullmatch(TOPIC_CHARACTERS, part) for part in name.split("."))
        ]:
            raise InvalidSetting(
                f"a topic's name can't have other characters than letters, digits, _ and -: {', '.join(invalid)}",
                rename,
            )
        listed = [entry.table for entry in tables]
        if duplicates := {name for name in listed if listed.count(name) > 1}:
            raise InvalidSetting(
                f"listed twice: {', '.join(sorted(duplicates))}", "take one of them out"
            )
        # The broker accepts only one of two topics, since its metrics don't distinguish . and _.
        problems = (
            "an index's name is in lower case, so these would share one",
            "topics that differ only in . and _ can't both be",
        )
        for number, problem in enumerate(problems):
            shared = [shared_names(name)[number] for name in names]
            if colliding := [
                name for name in names if shared.count(shared_names(name)[number]) > 1
            ]:
                raise InvalidSetting(f"{problem}: {', '.join(sorted(colliding))}", rename)
        return tables
