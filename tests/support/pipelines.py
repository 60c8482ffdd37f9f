"""Pipelines for tests, without a file."""

from typing import Any

from cdc.settings import Pipeline

NOWHERE = "127.0.0.1:1"


def pipeline(name: str, dsn: str, *tables: str | dict[str, Any], **settings: Any) -> Pipeline:
    """A pipeline with one cache; `source_...` settings go into the section `source`."""
    source = {key.removeprefix("source_"): settings.pop(key) for key in list(settings) if key.startswith("source_")}
    return Pipeline.model_validate(
        {
            "pipeline": name,
            "source": {"dsn": dsn, "tables": list(tables), **source},
            "sinks": {"cache": {"type": "redis", "url": "redis://127.0.0.1:1", "prefix": name}},
            "kafka": NOWHERE,
            "connect": f"http://{NOWHERE}",
            **settings,
        }
    )
