"""The Spark session: its settings, its jars, and the Python that it ships to its workers."""

import os
import shlex
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext, SparkFiles
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from cdc.errors import SparkError
from cdc.model import jvm_options
from cdc.spark.python_worker import DAEMON, MODULES

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
SETTINGS = {
    # Delta.
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Correctness: time stamps are computed and written in UTC, whatever zone the machine has.
    "spark.sql.session.timeZone": "UTC",
    # Correctness: the default writes nanoseconds, which overflow in other readers of the warehouse:
    # they read infinity as a day of 1969.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Correctness of comparisons: json may have a key twice, and of its values the last one counts.
    "spark.sql.variant.allowDuplicateKeys": "true",
    # What a log of events shows of settings and options: no logins of Kafka's client.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|keystore|jaas",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Adaptive plans off: batches are small and their plans don't change, so adapting costs more
    # than it gains.
    "spark.sql.adaptive.enabled": "false",
    # Codegen off: compiling new plans holds up a process that has just started. While Spark's
    # expressions decoded records, the first batch took 4 s so, and 11 s with it. It hasn't been
    # measured since Python decodes them. Plans of batches have hardly any expressions now, but
    # plans of comparisons, audits and merges in the warehouse do.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Off: without codegen, shared subexpressions are looked up in a cache for every row. That was a
    # tenth of decoding in Spark's expressions; of comparisons it hasn't been measured.
    "spark.sql.subexpressionElimination.enabled": "false",
    # Frames that comparisons and audits keep are uncompressed: they are read a few times and thrown
    # away. Choosing a compression for each column took a fifth of the time of batches, which were
    # kept once; of comparisons it hasn't been measured. No batch is kept any more.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Reset after each object: wide rows spill to disk in pieces of 4 MB, and the default keeps a
    # hundred of them in memory until all are written.
    "spark.serializer.objectStreamReset": "1",
    # The default list without Kafka: Kafka's V1 batch reader makes a Java object of every value and
    # takes it apart again.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
    # Off, because otherwise a union of inputs with one partition each has one partition itself, and
    # runs in one task.
    "spark.sql.unionOutputPartitioning": "false",
    "spark.locality.wait": "0",
    "spark.scheduler.mode": "FAIR",
    # Local log store: the default starts two dozen processes per commit to look for symbolic links,
    # and is no safer on a local disk.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
    # Two tasks to read a table's log; the default starts 50 for a few hundred files.
    "spark.databricks.delta.snapshotPartitions": "2",
    # Small Arrow batches: Spark sums up the size of all vectors at every row and walks through
    # nested ones. With 10,000 rows that took as long as everything else in a batch.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    # Memory: a thousand records of 10 MB were 10 GB in Spark and in its worker. The default bound
    # is 64 MB.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 * 2**20),
    # Off: recording where in Python each expression was made takes three of four calls into the
    # JVM, and a stack trace there.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # Short plans: each job's plan is written as text for listeners, which nobody reads: a twelfth
    # of Spark's CPU under a light load.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "0",
    "spark.sql.maxPlanStringLength": "0",
    # Latency: over TCP each job of a Python worker waits 40 ms for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
}
LOCAL = {
    SHUFFLE_PARTITIONS: str(os.cpu_count() or 2),
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": os.environ.get("SPARK_DRIVER_MEMORY", "1g"),
}
SHIPPED = "cdc.zip"
REMOTE = {
    # Before its first task an executor puts what the driver sends into its own folder, where it also
    # starts its daemon of Python workers.
    "spark.executorEnv.PYTHONPATH": SHIPPED,
    # Spark's messages may quote rows. Executors don't have the driver's settings of logs, only its level.
    "spark.executor.syncLogLevel.enabled": "true",
}
"""Settings for executors that are processes of their own."""
ARCHIVE = Path(sys.prefix, "share", "cdc", "spark-classes.jsa")
"""The archive of the classes that Spark's process loads at each start; it ends with the environment.

Java maps the archive into its memory instead of unpacking, parsing and checking some 12,000 classes
of 300 jars, which is a third of the CPU of a start. `cdc.runtime.class_archive` writes it. It holds
for this environment and this Java: one of another class path or Java is as good as none, so it may be
missing or old. A part of one would end Java, so it is written aside and moved here when it is whole.
"""
OUT_OF_MEMORY = 52
"""Exit code with which Spark ends itself when it runs out of memory."""
EXIT_WAIT_S = 5.0
"""Seconds to wait for Spark's process to end: a call to it fails a little earlier."""
MEMORY_HINT = (
    "give it more: SPARK_DRIVER_MEMORY=2g cdc -p FILE run; views go on from where they stand"
)
EXECUTOR_WAIT_S = 300.0
"""Seconds in which a cluster has started an executor, also one that has to fetch an image first."""
CLUSTER_HINT = "is the master up, and can it and its workers reach this host? their logs say more"
QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
STARTUP_NOISE = (
    "Picked up ",
    "WARNING: Using incubator modules",
    "Setting default log level",
    "To adjust logging level",
    "Using Spark's",
)
WORKER_MODULES = (
    "pyspark.worker",
    "pyarrow",
    "pandas",
    "pyarrow.parquet",
    "confluent_kafka",
    "cdc.spark.lane_records",
)
"""Modules that every worker needs. With its first array Arrow imports pandas, where it is
installed.
"""


def session(
    master: str,
    jars: Sequence[Path],
    settings: dict[str, str] | None = None,
    modules: Sequence[str] = (),
) -> SparkSession:
    """Start Spark on any master: `local[*]`, `spark://...`, `yarn`.

    modules: what else workers need; it is imported once for all of an executor.

    Raises:
        SparkError: the JVM of Spark has ended while it started; what it printed is on standard
            error. Or the cluster doesn't answer, or starts no executor.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if is_in_process(master):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    conf = SparkConf().setMaster(master).setAppName("cdc")
    conf.setAll([*{**settings_for(master, jars, modules), **(settings or {})}.items()])
    if SparkContext._gateway is None:
        _start_context(conf)
    try:
        spark = SparkSession.builder.config(conf=conf).getOrCreate()
        if not is_in_process(master):
            spark.sparkContext.setLogLevel("FATAL")
            spark.sparkContext.addPyFile(str(_archive()))
            _await_executor(spark)
            _set_shuffle_partitions(spark)
    except Py4JError as error:
        raise _start_error(master, error) from error
    return spark


def settings_for(master: str, jars: Sequence[Path], modules: Sequence[str]) -> dict[str, str]:
    """Spark's settings for a master; only a local driver keeps to the loopback address."""
    settings_of_process = {
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.extraJavaOptions": shlex.join(
            [QUIET, *jvm_options.default_options(), *archive_options()]
        ),
        "spark.python.daemon.module": DAEMON,
        f"spark.executorEnv.{MODULES}": ",".join((*WORKER_MODULES, *modules)),
    }
    return {**SETTINGS, **settings_of_process, **(LOCAL if is_in_process(master) else REMOTE)}


def is_in_process(master: str | None) -> bool:
    """Whether tasks run in the driver's own process."""
    return master is not None and (master == "local" or master.startswith("local["))


def archive_options(archive: Path = ARCHIVE) -> list[str]:
    """Java's options for a start with the archive; none where it is missing.

    Java would print a warning about an archive that doesn't fit, at every start.
    """
    if not archive.exists():
        return []
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]


def _start_context(conf: SparkConf) -> None:
    gateway = _quiet_gateway(conf)
    try:
        SparkContext(conf=conf, gateway=gateway)
    except Exception as error:
        if failure := exit_error(gateway):
            raise failure from error
        raise _start_error(conf.get("spark.master", ""), error) from error


def _start_error(master: str | None, error: Exception) -> Exception:
    """Say that a cluster refuses the application, or has ended it at its start; else the error as it is."""
    if is_in_process(master):
        return error
    return SparkError(f"Spark can't start on {master}.", hint=CLUSTER_HINT)


def _await_executor(spark: SparkSession) -> None:
    """Wait for an executor: Spark itself would wait for ever, without a word.

    Raises:
        SparkError: there is none in time, or the cluster has ended the application.
    """
    master = spark.sparkContext.master
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    deadline = time.monotonic() + EXECUTOR_WAIT_S
    # It counts the driver as well.
    while len(tracker.getExecutorInfos()) < 2:
        if failure := ended_by_cluster(spark):
            raise failure
        if time.monotonic() > deadline:
            spark.stop()
            raise SparkError(
                f"{master} has started no executor in {EXECUTOR_WAIT_S:.0f} s.",
                hint="has a worker free cores and memory? an application takes all cores that"
                " spark.cores.max doesn't deny it; does an executor fail? see the workers' logs",
            )
        time.sleep(0.1)


def _set_shuffle_partitions(spark: SparkSession) -> None:
    """Shuffle into as many partitions as the application may have slots, unless the user has set a number."""
    context = spark.sparkContext
    conf = context.getConf()
    if not conf.contains(SHUFFLE_PARTITIONS):
        slots = conf.get("spark.cores.max") or context.defaultParallelism
        spark.conf.set(SHUFFLE_PARTITIONS, str(slots))


def _quiet_gateway(conf: SparkConf) -> Any:
    """Start Spark's process; all that it prints goes to standard error, since standard output
    belongs to the verb.

    A terminal and a service manager signal all processes of a verb at once. Spark runs in a session
    of its own and ignores SIGTERM, so only the verb itself reacts, and ends Spark when the batch at
    hand is finished.
    """
    # A pipe of our own, read from the start: a JVM that can't start says why only there.
    output, output_of_spark = os.pipe()
    threading.Thread(
        target=_forward_output, args=(os.fdopen(output, "rb"),), name="spark-output", daemon=True
    ).start()
    popen_options = {
        "stdout": output_of_spark,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
    }
    try:
        gateway = launch_gateway(conf, popen_kwargs=popen_options)  # type: ignore[no-untyped-call]
    except PySparkRuntimeError as error:
        raise SparkError(
            "Spark's process was ended before it answered.",
            hint="is what it printed above about Java or memory? or was it killed? start again",
        ) from error
    finally:
        os.close(output_of_spark)
    signals = gateway.jvm.sun.misc
    signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
    return gateway


def _forward_output(lines: IO[bytes]) -> None:
    """Copy output to standard error, but for the lines that Java and Spark print at each start."""
    with lines:
        for line in lines:
            text = line.decode("utf-8", "replace")
            if not text.startswith(STARTUP_NOISE):
                sys.stderr.write(text)


def is_running(spark: SparkSession) -> bool:
    """Whether Spark's process lives, as far as this process has started it, and its cluster goes on with
    the application.
    """
    process = getattr(spark.sparkContext._gateway, "proc", None)
    return (process is None or process.poll() is None) and not ended_by_cluster(spark)


def ended_by_cluster(spark: SparkSession) -> SparkError | None:
    """Say that the cluster has ended the application, as it does after executors that couldn't start."""
    context = spark.sparkContext
    if is_in_process(context.master) or not context._jsc.sc().isStopped():
        return None
    return SparkError(f"{context.master} has ended this application.", hint=CLUSTER_HINT)


def exit_error(gateway: Any) -> SparkError | None:
    """Say why Spark's process has ended; None while it runs.

    py4j itself only says that nobody answers.
    """
    process = getattr(gateway, "proc", None)
    if process is None:  # started by spark-submit
        return None
    try:
        code = process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        return None
    if code == OUT_OF_MEMORY:
        return SparkError("Spark's process ran out of its memory.", hint=MEMORY_HINT)
    return SparkError(
        f"Spark's process was ended (exit code {code}).",
        hint="was it killed, for want of memory on this machine? start again; views go on from where they stand",
    )


def _archive() -> Path:
    """Pack the package into one zip, for workers that don't have it; client libraries come with the
    worker's own Python.
    """
    # Spark's own folder, which its process removes when it ends, however the driver ended.
    path = Path(SparkFiles.getRootDirectory()) / SHIPPED
    package = Path(__file__).parents[1]
    with zipfile.ZipFile(path, "w") as archive:
        # In a checkout the folders of destinations are links, which `rglob` doesn't follow.
        for folder, _, names in os.walk(package, followlinks=True):
            for file in (Path(folder, name) for name in names if name.endswith(".py")):
                archive.write(file, file.relative_to(package.parent))
    return path
