"""Lines of rows put together: bounded by their number and by their bytes."""

from collections.abc import Iterator

from cdc.verify.source_rows import CHUNK_BYTES, CHUNK_ROWS, chunk_lines


def test_narrow_rows_are_counted() -> None:
    chunks = list(chunk_lines([b"1,a\n"] * (2 * CHUNK_ROWS + 1)))
    assert [chunk.count(b"\n") for chunk in chunks] == [CHUNK_ROWS, CHUNK_ROWS, 1]


def test_wide_rows_are_measured() -> None:
    """No more lines are taken than one batch holds, and the first of the next."""
    count = 0

    def lines() -> Iterator[bytes]:
        nonlocal count
        for _ in range(100):
            count += 1
            yield b"x" * (CHUNK_BYTES // 4)

    chunks = chunk_lines(lines())
    assert len(next(chunks)) == CHUNK_BYTES
    assert count == 5


def test_a_row_that_is_longer_than_a_batch_comes_alone() -> None:
    long = b"x" * (CHUNK_BYTES + 1)
    assert [len(chunk) for chunk in chunk_lines([b"1", long, long, b"2", b"3"])] == [
        1,
        len(long),
        len(long),
        2,
    ]


def test_nothing() -> None:
    assert list(chunk_lines([])) == []
