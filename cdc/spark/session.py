"""The Spark session: its settings, the jars it is given and the Python it ships to its workers."""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from cdc.errors import SparkError
from cdc.model import jvm_options

SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    # The default has nanoseconds, which other readers of the warehouse overflow at: infinity was 1969 to them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Batches are small and their plans fixed: adapting them costs more than it gains.
    "spark.sql.adaptive.enabled": "false",
    # Compiling took 7 of a first batch's 11 s; decoding takes a quarter less CPU afterwards.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # What isn't compiled looks a shared value up in a cache for every row: a tenth of decoding.
    "spark.sql.subexpressionElimination.enabled": "false",
    # What a batch keeps is read twice and thrown away: looking for how to press each column took a fifth of it.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # What has no room goes to disk, in pieces of 4 MB if rows are wide: a hundred were held until all were written.
    "spark.serializer.objectStreamReset": "1",
    # The default without Kafka, whose older reader for batches makes objects of all values, to take them apart again.
    "spark.sql.sources.useV1SourceList": "avro,csv,json,orc,parquet,text",
    # Or a union whose parts have one partition each has one as well, and one task.
    "spark.sql.unionOutputPartitioning": "false",
    "spark.locality.wait": "0",
    "spark.scheduler.mode": "FAIR",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.pollingDelay": "20ms",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.metricsEnabled": "false",
    # The default starts two dozen processes a commit, to look for symbolic links, and is no safer on a local disk.
    "spark.delta.logStore.file.impl": "io.delta.storage.LocalLogStore",
    # 50 tasks by default for the few hundred files of a table's log.
    "spark.databricks.delta.snapshotPartitions": "2",
    # Spark asks for the size of all vectors at every row, nested ones are walked through for it: 10,000 rows took as
    # long as all the rest of a batch.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    # So many records of 10 MB were 10 GB, in Spark and in its worker; 64 MB by default.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(8 * 2**20),
    # Where in Python each expression was made: three of four calls into the JVM, and a stack trace there.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
    # Each job's plan is told to listeners as text, which nobody reads: a twelfth of Spark's CPU under a light load.
    "spark.sql.ui.explainMode": "simple",
    "spark.sql.debug.maxToStringFields": "0",
    "spark.sql.maxPlanStringLength": "0",
    # Over TCP each job of a Python worker waits 40 ms for an acknowledgement that is delayed.
    "spark.python.unix.domain.socket.enabled": "true",
    # 64 by default: with more partitions than that, of all streams together, a consumer is made anew for each batch.
    "spark.kafka.consumer.cache.capacity": "1000",
    "spark.driver.bindAddress": "127.0.0.1",
}
LOCAL = {"spark.driver.host": "127.0.0.1", "spark.driver.memory": os.environ.get("SPARK_DRIVER_MEMORY", "1g")}
OUT_OF_MEMORY = 52
"""With which Spark ends itself."""
ENDING_S = 5.0
"""A call to Spark's process fails a little before the process is gone."""
MEMORY_HINT = "give it more: SPARK_DRIVER_MEMORY=2g cdc -p FILE run; views go on from where they stand"
QUIET = f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"
SAYS_OF_ITSELF = (
    "Picked up ",
    "WARNING: Using incubator modules",
    "Setting default log level",
    "To adjust logging level",
    "Using Spark's",
)
PACKAGES = ("cdc", "sinks")
"""What an executor needs of this project; the client libraries are the worker's own Python's."""


def session(master: str, jars: Sequence[Path], settings: dict[str, str] | None = None) -> SparkSession:
    """Start Spark on any master: `local[*]`, `spark://...`, `yarn`."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    tasks = str(os.cpu_count() or 2)
    own = {
        "spark.sql.shuffle.partitions": tasks,
        "spark.jars": ",".join(map(str, jars)),
        "spark.driver.extraJavaOptions": shlex.join([QUIET, *jvm_options.default_options()]),
    }
    here = master.startswith("local[")
    if here:
        own["spark.python.daemon.module"] = "cdc.spark.python_worker"
    local = LOCAL if master.startswith("local") else {}
    conf = SparkConf().setMaster(master).setAppName("cdc")
    conf.setAll([*{**SETTINGS, **own, **local, **(settings or {})}.items()])
    if SparkContext._gateway is None:
        SparkContext(conf=conf, gateway=_quiet_gateway(conf))
    spark = SparkSession.builder.config(conf=conf).getOrCreate()
    if not here:
        spark.sparkContext.addPyFile(str(_archive()))
    return spark


def _quiet_gateway(conf: SparkConf) -> Any:
    """Start Spark's process, with all that it prints on standard error: standard output is a verb's own.

    What ends a verb by a signal often means all of its processes, a terminal and a service's manager do: only the verb
    itself takes it for a word, and ends Spark when the batch at hand is finished.
    """
    apart = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    gateway = launch_gateway(conf, popen_kwargs=apart)  # type: ignore[no-untyped-call]
    # Executors that Spark starts itself would inherit it, and it ends these by that signal.
    if not conf.get("spark.master", "").startswith("local-cluster"):
        signals = gateway.jvm.sun.misc
        signals.Signal.handle(signals.Signal("TERM"), signals.SignalHandler.SIG_IGN)
    if process := getattr(gateway, "proc", None):
        threading.Thread(target=_hand_on, args=(process.stdout,), name="spark-output", daemon=True).start()
    return gateway


def _hand_on(lines: IO[bytes]) -> None:
    """But for what Java and Spark say of themselves at each start."""
    with lines:
        for line in lines:
            text = line.decode("utf-8", "replace")
            if not text.startswith(SAYS_OF_ITSELF):
                sys.stderr.write(text)


def ended(spark: SparkSession) -> SparkError | None:
    """Why Spark's process is no more, if it isn't; py4j only says that nobody answers."""
    process = getattr(spark.sparkContext._gateway, "proc", None)
    if process is None:  # started by spark-submit
        return None
    try:
        code = process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return None
    if code == OUT_OF_MEMORY:
        return SparkError("Spark's process ran out of its memory.", hint=MEMORY_HINT)
    return SparkError(
        f"Spark's process was ended (exit code {code}).",
        hint="was it killed, for want of memory on this machine? start again; views go on from where they stand",
    )


def _archive() -> Path:
    """The project's own packages as one zip, for workers that don't have them."""
    path = Path(tempfile.mkdtemp(prefix="cdc-ship-")) / "cdc.zip"
    root = Path(__file__).parents[2]
    with zipfile.ZipFile(path, "w") as archive:
        for package in PACKAGES:
            for file in sorted((root / package).rglob("*.py")):
                archive.write(file, file.relative_to(root))
    return path
