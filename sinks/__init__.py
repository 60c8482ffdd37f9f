"""Destinations, a folder each. To add one: its folder, its settings, and one line here."""

from typing import TYPE_CHECKING

from cdc.config.settings import Delta, Elasticsearch, Pipeline, Redis

if TYPE_CHECKING:
    from cdc.sink.contract import Sink


def build(pipeline: Pipeline, name: str) -> "Sink":
    """The sink of that name in the pipeline file. Clients are imported only when used."""
    settings = pipeline.sinks[name]
    if isinstance(settings, Elasticsearch):
        from sinks.elasticsearch import sink as elasticsearch

        return elasticsearch.Elasticsearch(name, settings.url, pipeline.pipeline)
    if isinstance(settings, Redis):
        from sinks.redis import sink as redis

        return redis.Redis(name, settings.url, settings.prefix, settings.spare)
    assert isinstance(settings, Delta)
    from sinks.delta import sink as delta

    return delta.Delta(name, settings.path, pipeline.pipeline, rewritten=settings.without_deletion_vectors)
