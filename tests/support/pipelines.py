"""Pipelines for tests, most without a file."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cdc.config.server_settings import ConnectSettings, KafkaSettings
from cdc.config.settings import Pipeline
from cdc.kafka.clients import kafka
from cdc.kafka.topic_setup import ensure_topics
from cdc.kafka.topics import Topics
from cdc.model.position import ViewCheckpoint
from cdc.model.table import Table

NOWHERE = "127.0.0.1:1"
NO_SOURCE = f"postgresql://{NOWHERE}/none"


def pipeline(name: str, dsn: str, *tables: str | dict[str, Any], **settings: Any) -> Pipeline:
    """A pipeline with one cache; `source_...` settings go into the section `source`."""
    source = {
        key.removeprefix("source_"): settings.pop(key)
        for key in list(settings)
        if key.startswith("source_")
    }
    return Pipeline.from_tree(
        {
            "pipeline": name,
            "source": {"dsn": dsn, "tables": list(tables), **source},
            "sinks": {"cache": {"type": "redis", "url": "redis://127.0.0.1:1", "prefix": name}},
            "kafka": NOWHERE,
            "connect": f"http://{NOWHERE}",
            **settings,
        }
    )


def changed(original: Pipeline, **settings: Any) -> Pipeline:
    """The pipeline with other settings; `kafka` and `connect` are addresses."""
    if "kafka" in settings:
        settings["kafka_settings"] = KafkaSettings(brokers=settings.pop("kafka"))
    if "connect" in settings:
        settings["connect_settings"] = ConnectSettings(url=settings.pop("connect"))
    return original.model_copy(update=settings)


@contextmanager
def with_topics(
    name: str, bootstrap: str, *tables: str | dict[str, Any]
) -> Iterator[tuple[Pipeline, Topics]]:
    """A pipeline without a source, whose topics are on a broker until the end."""
    made = pipeline(name, NO_SOURCE, *tables, kafka=bootstrap)
    with Topics(bootstrap) as topics:
        ensure_topics(topics, made)
        yield made, topics
    with kafka.KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.delete_topics([topic for topic in admin.list_topics() if name in topic])


def unreachable_file(folder: Path, table: str) -> Path:
    """Write the file of a pipeline none of whose servers is there."""
    path = folder / "shop.yaml"
    path.write_text(
        f"pipeline: shop\nkafka: {NOWHERE}\nconnect: http://{NOWHERE}\n"
        f"source: {{dsn: 'postgresql://{NOWHERE}/x', tables: [{table}]}}\n"
        f"sinks: {{cache: {{type: redis, prefix: shop, url: 'redis://{NOWHERE}'}}}}\n"
    )
    return path


def position_by_table(
    position: Callable[[Table], ViewCheckpoint | None],
) -> Callable[[Sequence[Table]], Mapping[str, ViewCheckpoint | None]]:
    """`Sink.position` for several tables, by name."""
    return lambda tables: {table.qualified: position(table) for table in tables}
