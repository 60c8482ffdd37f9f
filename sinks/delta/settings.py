"""Settings of a sink of `type: delta` in the pipeline file."""

import os
from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from cdc.config.mistakes import InvalidSetting
from cdc.config.sink_kinds import TRIGGER, SinkSettings

if TYPE_CHECKING:
    from cdc.sink.contract import Sink


SCHEMES = ("s3", "gs", "abfss")
"""Of the URLs of buckets."""


def _folder(path: str, info: ValidationInfo) -> str:
    """Check a folder's path, or the URL of a bucket; a relative path is resolved against the pipeline
    file's folder.
    """
    if "://" in path or path.startswith("file:"):
        return _bucket(path)
    if not path.strip():
        raise InvalidSetting("is empty", "for example: path: /srv/warehouse")
    folder = (info.context or {}).get("folder")
    return os.path.normpath(Path(folder, Path(path).expanduser())) if folder else path


def _bucket(url: str) -> str:
    """Check the URL of a bucket, or of a folder in one."""
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise InvalidSetting(
            f"is a folder's path or the URL of a bucket, and {url.partition(':')[0]}: isn't supported",
            f"name a folder that all of Spark's executors reach, or a bucket: {'://, '.join(SCHEMES)}://",
        )
    bucket = rest.partition("/")[0]
    if not bucket or ":" in bucket or {"..", "."} & set(rest.split("/")):
        raise InvalidSetting(
            "isn't the URL of a bucket",
            f"for example: path: {scheme}://bucket/warehouse; credentials come from the environment",
        )
    return url.rstrip("/")


Folder = Annotated[str, AfterValidator(_folder)]


class Delta(SinkSettings):
    """Settings of a warehouse."""

    keeps_changes = True
    executor = "cdc.sinks.delta.executor"
    location_setting = "path"
    type: Literal["delta"]
    """Which kind of sink it is."""
    path: Folder = Field(examples=["/srv/warehouse", "s3://bucket/warehouse"])
    """The warehouse's folder; a relative path is the pipeline file's. Or the URL of a bucket, with a path in it:
    s3://, gs:// or abfss://. Credentials, region and endpoint come from the environment."""
    without_deletion_vectors: tuple[str, ...] = Field(default=(), examples=[["public.orders"]])
    """Tables, or patterns of tables, whose mirror has readers without support for deletion vectors (deltalake's
    `to_pandas()`, `to_pyarrow_table()`, `count()`). The price: instead of marking rows as deleted, a merge
    rewrites every file with a changed row."""
    trigger_s: float = Field(default=1.0, ge=0, description=TRIGGER)

    @property
    def place(self) -> Hashable:
        """What two sinks can't share: the folder, or the bucket's path."""
        return "delta", self.path if "://" in self.path else os.path.realpath(self.path)

    def refuse_strangers(self, name: str, listed: Sequence[str]) -> None:
        """Raise InvalidSetting when a table without deletion vectors isn't captured."""
        names = [table for table in self.without_deletion_vectors if "*" not in table]
        if strange := [
            table for table in names if not any(fnmatchcase(table, entry) for entry in listed)
        ]:
            raise InvalidSetting(
                f"{name}.without_deletion_vectors names what isn't in source.tables: {', '.join(strange)}",
                f"there are {', '.join(listed)}",
            )

    def build(self, name: str, pipeline: str) -> "Sink":
        from cdc.sinks.delta import sink

        return sink.Delta(
            name, self.path, pipeline, without_deletion_vectors=self.without_deletion_vectors
        )
