"""What every Java here is started with: what the caller says for all of them, and what suits a small machine."""

import os
import shlex

PATIENCE = "-XX:CompileThresholdScaling"
"""How much later than usual a method is compiled."""


def options() -> list[str]:
    """What the caller says: Java itself reads it, where it is given the caller's environment."""
    return shlex.split(os.environ.get("JAVA_TOOL_OPTIONS", ""))


def tuning() -> list[str]:
    """A choice of our own where the caller has made none.

    The garbage collector for throughput, whose pauses are short in a small heap. And few compiled methods: what runs
    now and then, as most of Spark's planning does, was compiled all the same, which took half of a cold start's CPU.
    """
    said = options()
    collected = any(option.startswith("-XX:+Use") and option.endswith("GC") for option in said)
    compiled = any(option.startswith(PATIENCE) for option in said)
    return [*([] if collected else ["-XX:+UseParallelGC"]), *([] if compiled else [f"{PATIENCE}=4"])]
