"""Folders of generations, and files in them, as the warehouse's own file system has them."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def generation_names(spark: "SparkSession", folder: str) -> list[str]:
    """List the generations that have a folder beside the live one, the oldest first."""
    parent, _, live = folder.rpartition("/")
    files, path = _file_system(spark, parent)
    if not files.exists(path):
        return []
    folders = (status.getPath().getName() for status in files.listStatus(path))
    return sorted(name.removeprefix(f"{live}@") for name in folders if name.startswith(f"{live}@"))


def live_folder(folder: str) -> str:
    """Return the folder of the live generation."""
    parent, _, name = folder.rpartition("/")
    return f"{parent}/{name.partition('@')[0]}"


def age_s(spark: "SparkSession", path: str) -> float:
    """Return how many seconds ago a file was written."""
    files, hadoop_path = _file_system(spark, path)
    return time.time() - float(files.getFileStatus(hadoop_path).getModificationTime()) / 1000


def remove_paths(spark: "SparkSession", paths: Iterable[str]) -> None:
    """Remove files, and folders with all that they contain, of one file system."""
    files = None
    for path in paths:
        files = files or _file_system(spark, path)[0]
        files.delete(_path(spark, path), True)


def _file_system(spark: "SparkSession", folder: str) -> tuple[Any, Any]:
    path = _path(spark, folder)
    return path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()), path


def _path(spark: "SparkSession", path: str) -> Any:
    jvm: Any = spark._jvm
    return jvm.org.apache.hadoop.fs.Path(path)
