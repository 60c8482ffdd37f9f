"""The names that a pipeline has ever used: its topics, and the tables that it has views of."""

from collections.abc import Iterable

from cdc.config.settings import Pipeline
from cdc.control import registrations
from cdc.kafka.ledger import Ledger
from cdc.kafka.topic_specs import topic_specs
from cdc.kafka.topics import Topics
from cdc.model.table import Table


def find_topics(pipeline: Pipeline, kafka: Topics) -> list[str]:
    """Find the topics of the pipeline that exist, also of tables and views that the file no longer
    names. Raises ConnectorError.

    Those come from what the pipeline itself has noted, so that no topic of others is among them,
    whatever its name begins with.
    """
    names = {*topic_specs(pipeline), *Ledger(pipeline, kafka).read().original_shapes}
    if registration := registrations.read(kafka, pipeline):
        names |= {pipeline.topic(table) for table in registration.names}
    names |= {topic for topic in kafka.names() if topic.startswith(pipeline.view_topic(""))}
    return sorted(kafka.existing(names))


def view_tables(pipeline: Pipeline, topics: Iterable[str]) -> list[Table]:
    """List what sinks may have views of, by name only: of these topics, and of the file."""
    captured = [pipeline.topic(entry.table) for entry in pipeline.source.tables]
    views = [pipeline.view_topic(name) for name in pipeline.views]
    begin = pipeline.topic("")
    tables = []
    for topic in sorted({*captured, *views, *topics}):
        schema, dot, name = topic.removeprefix(begin).partition(".")
        if topic.startswith(begin) and dot and schema != "cdc":
            tables.append(Table(schema, name, (), (), topic))
    return tables
