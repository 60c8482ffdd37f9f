"""Lines of rows put together: bounded by their number and by their bytes. That no more are taken than
one batch holds: `tests/integration/test_source_rows.py`.
"""

import pytest

from cdc.verify.source_rows import CHUNK_BYTES, CHUNK_ROWS, chunk_lines

LONG = b"x" * (CHUNK_BYTES + 1)


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        ([], []),
        ([b"1"] * (2 * CHUNK_ROWS + 1), [CHUNK_ROWS, CHUNK_ROWS, 1]),
        ([b"1", LONG, LONG, b"2", b"3"], [1, len(LONG), len(LONG), 2]),
    ],
    ids=["none", "narrow", "longer than a batch"],
)
def test_bytes_of_batches(lines: list[bytes], sizes: list[int]) -> None:
    assert [len(chunk) for chunk in chunk_lines(lines)] == sizes
