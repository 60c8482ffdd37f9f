"""Keys go to the partitions that Kafka's own client sends them to."""

from hypothesis import given
from hypothesis import strategies as st

from cdc.kafka.clients import kafka
from cdc.kafka.transactions import choose_partitions


@given(st.lists(st.binary(max_size=100), max_size=50), st.integers(1, 100))
def test_a_key_has_the_partition_of_the_client(keys: list[bytes], count: int) -> None:
    assert choose_partitions(keys, count) == [
        (kafka.partitioner.default.murmur2(key) & 0x7FFFFFFF) % count for key in keys
    ]


def test_known_hashes() -> None:
    """Values of `UtilsTest.testMurmur2` in Kafka's sources."""
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    count = 0x7FFFFFFF
    assert choose_partitions(list(hashes), count) == [
        (value & 0x7FFFFFFF) % count for value in hashes.values()
    ]
