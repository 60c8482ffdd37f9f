"""What a worker holds of a file that it writes."""

import pyarrow as pa
import pytest

from cdc.sinks.delta.files.failures import write_failure
from cdc.sinks.delta.files.parquet import GROUP_BYTES, GROUP_ROWS
from cdc.sinks.delta.log.add_files import row_groups


@pytest.mark.parametrize(("width", "groups"), [(1, 1), (100_000, 4)], ids=["narrow", "wide"])
def test_a_row_group_is_bounded_by_bytes_as_well(width: int, groups: int) -> None:
    part = pa.record_batch({"text": ["x" * width] * 100})
    sizes = [(group.num_rows, group.nbytes) for group in row_groups(iter([part] * 24))]
    assert sum(rows for rows, _ in sizes) == 2400
    assert len(sizes) == groups
    assert all(size < GROUP_BYTES + part.nbytes for _, size in sizes)


def test_a_row_group_is_bounded_by_rows() -> None:
    part = pa.record_batch({"number": [1] * 1000})
    assert [group.num_rows for group in row_groups(iter([part] * 101))] == [GROUP_ROWS, 1000]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "OSError: [Errno 28] No space left on device: '/w/part-1.parquet' of row 7",
            "No space left on device",
        ),
        (
            "Generic LocalFileSystem error\n ↳ Unable to copy\n ↳ File too large (os error 27)\n",
            "File too large",
        ),
        ("something with a value in it", "Exception"),
    ],
)
def test_what_a_disk_says_is_told_and_nothing_else(text: str, reason: str) -> None:
    assert (
        write_failure("/w", Exception(text)).message
        == f"The warehouse folder /w can't be written: {reason}."
    )
