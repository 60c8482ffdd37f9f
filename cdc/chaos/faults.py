"""Faults of the parts that every pipeline has: Postgres' sessions, the connector, `cdc run` on this host.

Each is a `cdc.sink.contract.Fault`. One that can't be begun raises a CdcError before it calls `hold`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import psutil
import psycopg

from cdc.config.settings import Pipeline
from cdc.connectors.client import Connect
from cdc.errors import SettingsError, SourceError
from cdc.kafka.topics import Topics
from cdc.observe.run_log import read_runs
from cdc.postgres import source
from cdc.sink.contract import Fault, Hold

OF_SLOT = """
SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
WHERE slot_name = %(pipeline)s AND active
"""
OF_PIPELINE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND (usename = %(replication)s OR application_name = 'cdc')
"""
RUN_HINT = "`cdc run` has to be at work on this host, as the same user"


def of_pipeline(pipeline: Pipeline, *, supervised: bool) -> Mapping[str, Fault]:
    """The faults by name. `supervised`: whether somebody starts `cdc run` again when it is killed."""
    end_sessions = partial(_end_sessions, pipeline)
    stop_connector = partial(_stop_connector, pipeline)
    faults: dict[str, Fault] = {
        "slot connection end": partial(end_sessions, OF_SLOT),
        "database sessions end": partial(end_sessions, OF_PIPELINE),
        "connector pause": partial(stop_connector, Connect.pause),
        "connector stop": partial(stop_connector, Connect.stop),
        "connector restart": partial(_restart_connector, pipeline),
        "run freeze": partial(_freeze_run, pipeline),
        "run kill workers": partial(_kill_workers, pipeline),
    }
    return {**faults, "run kill": partial(_kill_run, pipeline)} if supervised else faults


def _end_sessions(pipeline: Pipeline, statement: str, hold: Hold) -> None:  # noqa: ARG001  # over at once
    names = {"pipeline": pipeline.pipeline, "replication": pipeline.replication_user}
    with source.connect(pipeline.source.dsn) as connection:
        try:
            ended = connection.execute(statement, names).fetchall()
        except psycopg.Error as error:
            problem = error.diag.message_primary or type(error).__name__
            raise SourceError(
                f"Postgres refused to end a session: {problem}.",
                hint="GRANT pg_signal_backend to the user of source.dsn",
            ) from None
    if not ended:
        raise SourceError("No such session is open.", hint="cdc -p FILE status")


def _stop_connector(pipeline: Pipeline, stop: Callable[[Connect, str], None], hold: Hold) -> None:
    with Connect(pipeline.connect) as connect:
        try:
            stop(connect, pipeline.pipeline)
            hold()
        finally:
            connect.resume(pipeline.pipeline)


def _restart_connector(pipeline: Pipeline, hold: Hold) -> None:  # noqa: ARG001  # over at once
    with Connect(pipeline.connect) as connect:
        connect.restart(pipeline.pipeline)


def _freeze_run(pipeline: Pipeline, hold: Hold) -> None:
    with frozen(_runs(pipeline)):
        hold()


def _kill_workers(pipeline: Pipeline, hold: Hold) -> None:  # noqa: ARG001  # over at once
    processes = _runs(pipeline)
    with _mine():
        machines = [process for process in processes if process.name() == "java"]
        workers = [worker for machine in machines for worker in machine.children(recursive=True)]
    if not workers:
        raise SettingsError("`cdc run` has no Python worker on this host.", hint=RUN_HINT)
    _signal(workers, psutil.Process.kill)


def _kill_run(pipeline: Pipeline, hold: Hold) -> None:  # noqa: ARG001  # over at once
    _signal(_runs(pipeline), psutil.Process.kill)


def _runs(pipeline: Pipeline) -> list[psutil.Process]:
    """Find the processes of every `cdc run` on this host. Raises SettingsError if there is none."""
    with Topics(pipeline.kafka) as kafka:
        pids = read_runs(pipeline, kafka).pids
    processes = list[psutil.Process]()
    for pid in sorted(pids):
        with _mine(), suppress(psutil.NoSuchProcess):
            leader = psutil.Process(pid)
            # The number may be another process' by now, or another host's of the same name.
            if "run" in leader.cmdline():
                processes += [leader, *leader.children(recursive=True)]
    if not processes:
        raise SettingsError("No `cdc run` of this pipeline is on this host.", hint=RUN_HINT)
    return processes


@contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Suspend processes until the block ends: they take connections and answer none."""
    try:
        _signal(processes, psutil.Process.suspend)
        yield
    finally:
        _signal(processes, psutil.Process.resume)


def _signal(processes: Sequence[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        # It may have ended with its parent.
        with _mine(), suppress(psutil.NoSuchProcess):
            send(process)


@contextmanager
def _mine() -> Iterator[None]:
    try:
        yield
    except psutil.AccessDenied as error:
        raise SettingsError(
            f"Process {error.pid} belongs to another user.", hint="run cdc chaos as that user"
        ) from None
