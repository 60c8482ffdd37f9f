"""Renew topics from which views can no longer be made: topics with another number of partitions,
cut topics, and topics with records of a key in several partitions.

In:  the pipeline file, the tables. Out: empty topics as the file says, and requests for all rows of
their tables.
Invariant: the connector is stopped while topics are deleted, and nothing is deleted that can't be
created again. After a crash, the next registration completes the work.
"""

from collections.abc import Callable, Sequence

from cdc.capture.connector import RegistrationResult, register
from cdc.config.settings import Pipeline
from cdc.config.view_settings import SCHEMA, closes
from cdc.connectors.client import Connect
from cdc.errors import SettingsError
from cdc.kafka.topic_setup import refuse_others, topic_specs
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres.table_survey import table_named, views_by_name_only


def select_renewed(
    kafka: Topics,
    pipeline: Pipeline,
    tables: Sequence[Table],
    names: Sequence[str],
    *,
    forget: bool,
) -> list[Table]:
    """Select the tables and views with these names. A view's topic has as many partitions as its
    root's, so the views of these tables are selected as well if the number changes. Other views
    keep their topics, so that readers keep their documents.

    `forget`: also a view whose windows close, and a table of events. Only their topics know what the
    closed windows were, and the events that were deleted.

    Raises:
        SettingsError: an unknown name; or such a view or table, unless with `forget`.
        ConnectorError: from the broker.
    """
    views = views_by_name_only(pipeline)
    named = [table_named((*tables, *views), name) for name in names]
    roots = {view.topic: view for view in views if pipeline.views[view.name].root in names}
    counts = topic_specs(pipeline)
    moved = [
        roots[topic]
        for topic, end in kafka.ends(sorted(kafka.existing(roots))).items()
        if end.partition_count != counts[topic]
    ]
    selected = {table.qualified: table for table in (*named, *moved)}
    only_there = {
        f"{SCHEMA}.{name}": "its closed windows: they would be made again of the rows as they are now"
        for name, view in pipeline.views.items()
        if closes(view)
    }
    only_there |= {
        table.qualified: "the events that were deleted in Postgres: views would lack them"
        for table in tables
        if table.events
    }
    for name in () if forget else selected.keys() & only_there.keys():
        raise SettingsError(
            f"Only the topic of {name} has {only_there[name]}.",
            hint="if that is meant, add --forget",
        )
    return list(selected.values())


def renew(
    pipeline: Pipeline,
    tables: Sequence[Table],
    renewed: Sequence[Table],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> RegistrationResult:
    """Delete the topics of some tables and views, create them again, and request the tables' rows.
    `cdc run` sends the documents of the views again.

    Raises:
        ConnectorError: another topic isn't as the file says. Nothing has been deleted then.
        SourceError, ConnectorError: see `register`, which completes the work.
    """
    with Topics(pipeline.kafka) as kafka, Connect(pipeline.connect) as connect:
        refuse_others(kafka, pipeline, [table.topic for table in renewed])
        if connect.config(pipeline.pipeline) is not None:
            connect.stop(pipeline.pipeline)
        kafka.remove([table.topic for table in renewed])
        progress(f"the topics of {', '.join(table.qualified for table in renewed)} are gone")
    return register(pipeline, tables, progress=progress)
