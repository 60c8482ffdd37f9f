"""The sink that a name in the pipeline file stands for."""

from cdc.config.settings import Pipeline
from cdc.sink.contract import Sink


def build(pipeline: Pipeline, name: str) -> Sink:
    """The sink of that name, of whatever kind. Clients are imported only when used."""
    sink: Sink = pipeline.sinks[name].build(name, pipeline.pipeline)
    return sink
