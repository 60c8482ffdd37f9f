"""Options of every Java process here: the caller's own, and defaults for a small machine."""

import os
import shlex

COMPILE_THRESHOLD = "-XX:CompileThresholdScaling"
"""Scales how often a method has to run before it is compiled."""


def caller_options() -> list[str]:
    """The options in the caller's `JAVA_TOOL_OPTIONS`. A Java that inherits the environment reads
    them itself.
    """
    return shlex.split(os.environ.get("JAVA_TOOL_OPTIONS", ""))


def default_options() -> list[str]:
    """The project's options, each only where the caller has chosen none.

    The throughput garbage collector has short pauses in a small heap. A raised threshold compiles
    fewer methods: most of Spark's planning runs only now and then, but was compiled all the same,
    which took half of a cold start's CPU.
    """
    chosen = caller_options()
    collector_chosen = any(
        option.startswith("-XX:+Use") and option.endswith("GC") for option in chosen
    )
    threshold_chosen = any(option.startswith(COMPILE_THRESHOLD) for option in chosen)
    defaults = []
    if not collector_chosen:
        defaults.append("-XX:+UseParallelGC")
    if not threshold_chosen:
        defaults.append(f"{COMPILE_THRESHOLD}=4")
    return defaults
