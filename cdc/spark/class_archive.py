"""The archive of the classes that Spark's process loads at each start, for who starts one.

Java maps the archive into its memory instead of unpacking, parsing and checking some 12,000 classes
of 300 jars, which is a third of the CPU of a start. `cdc.runtime.class_archive` writes it. It holds
for this environment and this Java: one of another class path or Java is as good as none, so it may be
missing or old. A part of one would end Java, so it is written aside and moved here when it is whole.
"""

import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix, "share", "cdc", "spark-classes.jsa")
"""In the environment, with which it ends."""


def read_options(archive: Path = ARCHIVE) -> list[str]:
    """Java's options for a start with the archive; none where it is missing.

    Java would print a warning about an archive that doesn't fit, at every start.
    """
    if not archive.exists():
        return []
    return [f"-XX:SharedArchiveFile={archive}", "-Xlog:cds=off", "-Xlog:cds+dynamic=off"]
