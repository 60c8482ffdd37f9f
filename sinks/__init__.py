"""Destinations, a folder each. To add one: its folder, with its settings, and one line here."""

from cdc.sinks.delta.settings import Delta
from cdc.sinks.elasticsearch.settings import Elasticsearch
from cdc.sinks.redis.settings import Redis

SETTINGS = (Elasticsearch, Redis, Delta)
"""The kinds that come with the pipeline: an entry point of `cdc.sinks`, see
`cdc.config.sink_kinds`.
"""
