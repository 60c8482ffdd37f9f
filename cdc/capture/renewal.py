"""Renewal of topics that can't make views any more: of another shape, cut, or with keys in other
partitions.

In:  the pipeline file, the tables. Out: empty topics as the file says, and requests for all rows of
their tables.
Invariant: the connector is stopped while a topic is deleted, and nothing is deleted that can't be
created again. The next registration mends what a crash leaves.
"""

from collections.abc import Callable, Sequence

from cdc.capture.connector import RegistrationResult, register
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.kafka.topic_setup import refuse_others
from cdc.kafka.topic_specs import topic_specs
from cdc.kafka.topics import Topics
from cdc.model.table import Table
from cdc.postgres.table_survey import table_named, views_by_name_only


def select_renewed(
    kafka: Topics, pipeline: Pipeline, tables: Sequence[Table], names: Sequence[str]
) -> list[Table]:
    """Select the tables and views of these names, and the views of these tables that the file gives
    another number of partitions: a view's topic has as many as its root's. Other views keep their
    topics, so that readers keep their documents.

    Raises:
        SettingsError: an unknown name. ConnectorError: from the broker.
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
    return list({table.qualified: table for table in (*named, *moved)}.values())


def renew(
    pipeline: Pipeline,
    tables: Sequence[Table],
    renewed: Sequence[Table],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> RegistrationResult:
    """Delete the topics of some of the pipeline's tables and views, create them again, have the
    rows of the tables sent. Documents are sent by the run, whose state notices.

    Raises:
        ConnectorError: another topic isn't as the file says; nothing is deleted then.
        SourceError, ConnectorError: see `register`, which goes on from there.
    """
    with Topics(pipeline.kafka) as kafka, Connect(pipeline.connect) as connect:
        refuse_others(kafka, pipeline, [table.topic for table in renewed])
        if connect.config(pipeline.pipeline) is not None:
            connect.stop(pipeline.pipeline)
        kafka.remove([table.topic for table in renewed])
        progress(f"the topics of {', '.join(table.qualified for table in renewed)} are gone")
    return register(pipeline, tables, progress=progress)
