"""Renewal of topics that can't make views any more: of another shape, cut, or with keys in other
partitions.

In:  the pipeline file, the tables. Out: empty topics as the file says, and requests for all rows of
their tables.
Invariant: the connector is stopped while a topic is deleted. The next registration mends what a
crash leaves.
"""

from collections.abc import Callable, Sequence

from cdc.capture.connector import RegistrationResult, register
from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.kafka.topics import Topics
from cdc.model.table import Table


def renew(
    pipeline: Pipeline,
    tables: Sequence[Table],
    renewed: Sequence[Table],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> RegistrationResult:
    """Delete the topics of some of the pipeline's tables, create them again, have their rows sent.

    Raises:
        SourceError, ConnectorError: see `register`, which goes on from there.
    """
    with Topics(pipeline.kafka) as kafka, Connect(pipeline.connect) as connect:
        if connect.config(pipeline.pipeline) is not None:
            connect.stop(pipeline.pipeline)
        kafka.remove([table.topic for table in renewed])
        progress(f"the topics of {', '.join(table.qualified for table in renewed)} are gone")
    return register(pipeline, tables, progress=progress)
