"""Verbs of the command line, without the start of a process each: those that need no Spark in a fork of a process
that has imported them, the others in this process, whose Spark is warm.

A start takes a second of CPU, one with Spark ten. Where the start or the end of a process is what
is tested, the process is started: `World.process`, `World.command`.
"""

import io
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "cdc.cli.verbs",
        "cdc.capture.connector",
        "cdc.control.operations",
        "cdc.observe.examination",
        "cdc.generations.registry",
        "cdc.migrations",
        "cdc.observe.collection",
        "cdc.observe.diagnosis",
        "cdc.quarantine.log",
        "cdc.runtime.context",
        "cdc.sinks.delta.sink",
        "cdc.sinks.elasticsearch.sink",
        "cdc.sinks.redis.sink",
        "cdc.documents.plan",
        "cdc.documents.source_checks",
        "elasticsearch",
        "httpcore",
        "pyarrow",
        "tests.support.verbs",
    ]
)
SPARK_VERBS = (("run",), ("verify",), ("chaos",), ("rebuild",), ("topics", "audit"))
"""Beginnings of verbs that start Spark."""


def run_verb(words: Sequence[str]) -> "CompletedProcess[str]":
    """Run a verb, `words` with its options: its exit code, and what it has printed."""
    verb = words[words.index("--state") + 2 :]
    needs_spark = any(tuple(verb[: len(start)]) == start for start in SPARK_VERBS)
    return run_with_spark(words) if needs_spark else run_forked(words)


def document_of(file: Path, verb: str, code: int | None = 0) -> Any:
    """Run a verb of a pipeline file in this process; return the JSON document that it prints."""
    answer = run_here(["-p", str(file), "--state", str(file.parent), verb, "--json"])
    assert code in (None, answer.returncode), f"{answer.stdout}{answer.stderr}"
    return json.loads(answer.stdout)


def run_forked(words: Sequence[str]) -> "CompletedProcess[str]":
    """Run a verb in a process of its own, with this one's environment."""
    with tempfile.TemporaryDirectory(prefix="cdc-verb-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = FORKS.Process(target=_run, args=(words, dict(os.environ), out, err))
        process.start()
        process.join()
        code = process.exitcode
        process.close()
        assert code is not None
        return CompletedProcess(words, code, out.read_text(), err.read_text())


def _run(words: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["cdc", *words]
    from cdc import entry

    entry.main()


def run_with_spark(words: Sequence[str], err: io.StringIO | None = None) -> "CompletedProcess[str]":
    """Run a verb in this process, whose Spark goes on."""
    from pyspark.sql import SparkSession

    with mock.patch.object(SparkSession, "stop"):
        return run_here(words, err)


def run_here(words: Sequence[str], err: io.StringIO | None = None) -> "CompletedProcess[str]":
    """Run a verb in this process, in its main thread. What it says, and what other threads log
    meanwhile, is in `err` at once.
    """
    from cdc.cli import console, verbs

    out, err = io.StringIO(), err or io.StringIO()
    console.call.answered = False
    with (
        mock.patch.object(sys, "argv", ["cdc", *words]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            verbs.main()
        except SystemExit as end:
            return CompletedProcess(words, int(end.code or 0), out.getvalue(), err.getvalue())
