"""What every Java here is started with: what the caller says for all of them, and a garbage collector."""

import os
import shlex


def options() -> list[str]:
    """What the caller says: Java itself reads it, where it is given the caller's environment."""
    return shlex.split(os.environ.get("JAVA_TOOL_OPTIONS", ""))


def collector() -> list[str]:
    """The one for throughput, whose pauses are short in a small heap; nothing where the caller has named one."""
    named = any(option.startswith("-XX:+Use") and option.endswith("GC") for option in options())
    return [] if named else ["-XX:+UseParallelGC"]
