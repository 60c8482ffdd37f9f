"""The end of the program."""

import subprocess
import sys

from tests.support.pages import ROOT

HANGING = """
import io, sys, threading
import pyarrow as pa
import pyarrow.parquet as pq

asked = threading.Event()

class Hanging(io.BytesIO):
    def read(self, *size):
        # The schema is read by the thread itself, rows are by Arrow's.
        if threading.current_thread().name != "ask-warehouse":
            asked.set()
            threading.Event().wait()
        return super().read(*size)

data = io.BytesIO()
pq.write_table(pa.table({"n": [1]}), data)
file = Hanging(data.getvalue())
threading.Thread(target=pq.read_table, args=(file,), name="ask-warehouse", daemon=True).start()
if not asked.wait(30):
    sys.exit("nothing hangs")
sys.argv = ["cdc", *sys.argv[1:]]
from cdc import entry
entry.main()
"""


def test_a_question_that_hangs_ends_with_the_program() -> None:
    """Otherwise Arrow's exit handler waits for it: `cdc status` has answered, and never ends."""
    words = [sys.executable, "-c", HANGING]
    ended = subprocess.run(
        [*words, "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout.startswith("cdc ")) == (0, True), ended
    refused = subprocess.run(
        [*words, "nothing"], cwd=ROOT, capture_output=True, timeout=60, check=False
    )
    assert refused.returncode == 2
