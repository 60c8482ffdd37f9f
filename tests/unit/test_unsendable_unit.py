"""Which change has ended the connector's task, and what a registration says of its table."""

import msgspec
import pytest

from cdc.capture.aside import Unsendable, read_causes
from cdc.control.registrations import Captured, Registration, refuse_waiting
from cdc.model.obstacle import Obstacle
from cdc.model.position import Position

# As Kafka Connect 4.2 and Debezium 3.7 write them.
FLUSH = "org.apache.kafka.connect.errors.ConnectException: Failed to flush offsets and/or records for task shop-0\n"
KEYLESS = (
    "Caused by: org.apache.kafka.common.InvalidRecordException: One or more records have been rejected due to"
    " 1 record errors in total, and only showing the first three errors at most: [RecordError(batchIndex=0,"
    " message='Compacted topic cannot accept message without key in topic partition shop.public.a-b.c-12')]"
)
TOO_LARGE = (
    "org.apache.kafka.common.KafkaException: Cannot execute transactional method because we are in an error state\n"
    "Caused by: org.apache.kafka.common.errors.RecordTooLargeException: The message is 19200589 bytes when"
    " serialized which is larger than 16777216, which is the value of the max.request.size configuration."
)
UNREADABLE = (
    "org.apache.kafka.connect.errors.ConnectException: An exception occurred in the change event producer.\n"
    "Caused by: org.apache.kafka.connect.errors.ConnectException: Error while processing event at offset"
    " {lsn_proc=102491552, lsn_events_processed=1, messageType=INSERT, lsn_commit=102491408, lsn=102491552,"
    " txId=2008, ts_usec=1795788690686666}\n"
    "Caused by: java.lang.StringIndexOutOfBoundsException: String index out of range: 3"
)
ALIKE = (
    "org.apache.kafka.connect.errors.ConnectException: An exception occurred in the change event producer.\n"
    "Caused by: io.debezium.DebeziumException: Table 'public.notes' has columns that differ only by case. Column"
    " name: 'NOTE'. Please rename one of the duplicate columns before running Debezium."
)
LOST = (
    "org.apache.kafka.connect.errors.ConnectException: Failed to flush offsets and/or records for task shop-0\n"
    "Caused by: org.apache.kafka.common.errors.ProducerFencedException: There is a newer producer with the same"
    " transactionalId which fences the current one."
)
ORDERS, NOTES = "shop.orders", "shop.notes"
BOTH = Registration(tables={ORDERS: Captured(), NOTES: Captured(("hidden",))})


@pytest.mark.parametrize(
    ("causes", "change"),
    [
        (FLUSH + KEYLESS, Unsendable(Obstacle.KEYLESS, "public.a-b.c")),
        # Debezium refuses the table's description, also of a table that it doesn't capture.
        (ALIKE, None),
        (TOO_LARGE, Unsendable(Obstacle.TOO_LARGE)),
        (UNREADABLE, Unsendable(Obstacle.UNREADABLE, lsn=102491552)),
        (LOST, None),
        ("org.postgresql.util.PSQLException: FATAL: password authentication failed", None),
        ("", None),
    ],
)
def test_the_trace_says_which_change_it_was(causes: str, change: Unsendable | None) -> None:
    assert read_causes(causes, "shop") == change


def test_a_table_that_is_aside_is_not_captured_and_is_kept_in_mind() -> None:
    aside = BOTH.set_aside(NOTES, Obstacle.KEYLESS)
    assert list(aside.tables) == [ORDERS]
    assert sorted(aside.names) == [NOTES, ORDERS]
    assert msgspec.json.decode(msgspec.json.encode(aside), type=Registration) == aside
    # It has a separate finding.
    refuse_waiting(aside, [ORDERS, NOTES])


def test_a_registration_keeps_a_table_aside_until_it_captures_it() -> None:
    aside = BOTH.set_aside(NOTES, Obstacle.TOO_LARGE)
    without = Registration(tables={ORDERS: Captured()})
    assert aside.renew(without, aside.tables, {}, moved=False).aside == {NOTES: "too large"}
    dead = {"shop.shop.notes": Position("x", (7,))}
    back = aside.renew(BOTH, aside.tables, dead, moved=False)
    assert (back.aside, sorted(back.tables), back.since) == ({}, [NOTES, ORDERS], dead)
