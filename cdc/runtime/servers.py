"""Servers and processes that a verb starts and stops: the local stack, of either kind, and Spark."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cdc.compose import stack, stack_state
from cdc.config import settings
from cdc.errors import CdcError, SettingsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cdc.compose.stack_state import Endpoints


class Stack(Protocol):
    """A kind of local stack: servers as processes, or servers as containers."""

    def up(self, state: Path, *, progress: Callable[[str], None]) -> "Endpoints":
        """Start the servers that don't run; `progress` gets lines for people. Raises StackError."""

    def down(self, state: Path, *, progress: Callable[[str], None]) -> list[str]:
        """Stop the servers, and return the names of those that ran. Raises StackError."""

    def purge(self, state: Path, *, progress: Callable[[str], None]) -> list[str]:
        """Stop the servers and remove their data; returns what was removed. Raises StackError."""


@dataclass(frozen=True)
class SecuredStack:
    """Processes that ask who their clients are. file: the pipeline that gets rights by its name."""

    file: Path

    def up(self, state: Path, *, progress: Callable[[str], None]) -> "Endpoints":
        return stack.up(state, progress=progress, secured_for=settings.name_of(self.file))

    down = staticmethod(stack.down)
    purge = staticmethod(stack.purge)


def local_stack(kind: str | None, state: Path, file: Path) -> Stack:
    """Choose the kind of local stack: the one given, else the one the state folder belongs to, else
    embedded.
    """
    from cdc.compose import docker

    stacks: dict[str, Stack] = {
        "embedded": stack,
        "secured": SecuredStack(file),
        "compose": docker,
    }
    kind = kind or stack_state.stack_kind(state) or "embedded"
    if kind not in stacks:
        raise SettingsError(f"There is no stack {kind}.", hint=f"one of: {', '.join(stacks)}")
    return stacks[kind]


@contextmanager
def spark_on(master: str, modules: Sequence[str] = ()) -> "Iterator[SparkSession]":
    """Start a Spark session for one verb, and stop it afterwards. modules: see `session`.

    Raises:
        SparkError: the JVM of Spark has ended meanwhile, or its cluster has ended the application,
            whatever error that caused here.
    """
    # First, so that nothing is fetched where there is no Spark.
    from cdc.compose import artifacts
    from cdc.spark.session import ended_by_cluster, exit_error, session

    spark = session(master, artifacts.spark_jars(), modules=modules)
    try:
        try:
            yield spark
        finally:
            ended = ended_by_cluster(spark)
            spark.stop()
            if ended:
                raise ended
    except CdcError:
        raise
    except Exception as error:
        if failure := exit_error(spark.sparkContext._gateway):
            raise failure from error
        raise
