"""Histories that have found something, shrunk, as `history.parsed` takes them."""

MENDED = (
    # The index had a newer document, with a null, from a batch that was cut: a change before it went into
    # quarantine.
    "295 index default transactions: write 0 0 0 8 0 1 2 7 1 0 3 2 1 1 0 5 "
    "+100, write 3 0 0 0 +300, write 0 0 0 7 1 0 1 12 3 0 4 2 +30, write 0 "
    "0 3 9 0 0 0 2 +300, write 1 0 3 9 0 0 4 1 +30, write 2 1 2 13 +300, "
    "write 1 1 4 6 2 0 1 0 0 0 1 13 0 1 1 15 +3, kill_run +30, write 0 0 2 "
    "6 0 0 0 3 0 0 3 6 +300, write 1 0 4 3 0 0 2 0 0 1 0 8 3 1 3 2 +100, "
    "lose_answers 2 +3, write 3 1 3 1 1 1 0 6 0 0 4 7 +300, write 2 1 2 11 "
    "2 1 2 9 0 1 3 0 +0, kill_run +0, write 1 0 4 11 +30, write 1 0 1 11 "
    "+100",
    # A rebuild could never be promoted: the new topic had no record, so the new view had no position.
    "1489 index full transactions: write 0 0 2 2 +0, write 2 0 2 7 +1000, recreate 0 +0",
    # The standby had rows of a first batch that was cut, and kept them when it was filled again after a TRUNCATE.
    "248 index default transactions: write 2 1 2 8 +30, write 3 1 0 1 0 0 "
    "0 1 1 1 0 0 0 1 4 4 +0, write 0 0 4 10 +30, write 1 0 2 0 2 0 3 11 3 "
    "1 0 2 +0, truncate 1 +300, write 1 1 1 5 0 0 0 11 0 1 2 10 +10, write "
    "3 0 4 3 +30, freeze_run 13 +30, rebuild 2 +30, write 3 1 4 3 0 1 4 13 "
    "0 0 0 10 1 1 0 2 +10, truncate 0 +100, kill_run +1000, truncate 1 +0",
    # A cache lost a TRUNCATE; its rows from before it were gone on with.
    "252 cache full transactions: write 1 0 4 11 +1000, save +0, truncate 0 +0, truncate 0 +1000, "
    "write 1 1 1 13 0 0 1 11 +0, go_back +100",
    "252 cache full transactions: write 1 0 4 11 +1000, save +0, truncate 0 +30, kill_run +0, "
    "truncate 0 +1000, write 0 0 1 11 +30, go_back +100",
    # A rebuild was killed in its promotion, and repeated once its topics had been made again: it completed the
    # promotion, and left views that no log continues.
    "104490 warehouse full records: rebuild 3 +100, write 0 0 3 2 1 0 0 15 0 1 2 6 0 0 2 6 +100, kill_run +300, "
    "write 1 1 3 7 2 0 2 8 2 0 1 2 0 1 1 5 +100, night 30 +0",
    # A rebuild waited for ever for the end of a topic that had been made again meanwhile.
    "108811 warehouse default transactions: rebuild 3 +0, write 0 0 3 15 +300, recreate 0 +0",
)
"""Of real bugs."""
FOUND = {
    "last row wins": "0 index default transactions: write 0 0 3 10 1 0 1 10 0 0 1 8 +0, "
    "write 1 0 1 1 3 0 4 1 2 0 0 2 +0",
    "placeholder written": "0 index default transactions: write 0 0 3 10 1 0 1 10 0 0 1 8 +0, "
    "write 1 0 1 1 3 0 4 1 2 0 0 2 +0",
    "null for what the log leaves out": "0 index default transactions: write 0 0 3 10 1 0 1 10 0 0 1 8 +0, "
    "write 1 0 1 1 3 0 4 1 2 0 0 2 +0",
    "records in the wrong order": "2 warehouse full transactions: write 0 0 3 14 2 0 3 14 0 1 3 15 +0, "
    "write 1 1 1 7 1 1 2 8 0 1 1 13 1 0 2 11 +0",
    "deletes ignored": "0 index default transactions: write 0 1 0 9 1 0 4 10 1 1 0 9 1 1 4 12 "
    "+0, write 3 0 4 1 2 1 0 8 +0",
    "`before` of a delete trusted": "0 index default transactions: write 0 1 0 9 1 0 4 10 1 1 0 9 1 1 4 12 "
    "+0, write 3 0 4 1 2 1 0 8 +0",
    "floor ignored": "3 warehouse full transactions: write 1 0 2 13 2 1 4 0 2 1 4 5 +0, "
    "truncate 0 +0",
    "TRUNCATE ignored": "3 warehouse full transactions: write 1 0 2 13 2 1 4 0 2 1 4 5 +0, "
    "truncate 0 +0",
    "cleared, but for its position": "3 warehouse full transactions: write 1 0 3 1 +0, write 3 1 0 3 +100, "
    "write 2 1 3 11 +100, truncate 0 +0",
    "cleared, but for its rows": "3 warehouse full transactions: write 1 0 2 13 2 1 4 0 2 1 4 5 +0, "
    "write 0 1 0 15 +300, truncate 0 +0",
    "range ends short": "1 warehouse full records: write 1 0 3 11 2 0 4 3 3 1 3 3 +0",
    "range begins late": "1 warehouse full records: write 1 1 1 7 +1000, write 0 1 4 9 1 1 1 1 +0",
    "gap taken for lost records": "0 index default transactions: write 0 1 4 3 +100, write 1 1 4 15 0 0 "
    "0 1 +0",
    "lost records taken for a gap": "47 index full transactions: write 1 1 4 12 +1000, write 2 0 0 1 1 0 0 "
    "3 0 1 1 1 +0, away 98 +100, night 30 +0",
    "open transactions passed": "27 cache full transactions: write 3 1 2 4 0 0 1 12 0 0 4 15 +0, "
    "repeat 4 +100, freeze_run 4 +300, resend 0 +0, lose_answers 3 +0, "
    "write 1 0 0 7 1 0 4 9 0 1 1 5 +0, write 2 1 1 0 0 0 2 13 +0, quiet "
    "+0, away 2 +0, write 0 1 4 15 0 0 1 7 3 0 2 3 +1000, write 0 1 3 13 "
    "+100",
    "late deletes not refused": "5 cache full transactions: save +0, write 2 0 3 10 1 0 2 5 0 1 0 11 1 "
    "1 3 13 +0, write 3 1 4 3 +300, write 3 0 4 3 2 1 0 11 1 0 2 2 +0, "
    "away 20 +300, night 30 +0",
    "position before rows": "12 index full transactions: write 1 1 4 8 0 0 3 0 0 1 1 5 +0, write 0 "
    "0 0 1 +1000, lose_answers 3 +0, write 0 0 1 0 +100",
    "failure taken for success": "33 cache full transactions: write 0 1 3 2 +100, repeat 2 +1000, write "
    "0 1 3 9 +0, write 0 0 1 3 +0, write 0 1 2 1 0 0 3 6 1 1 4 15 +0, "
    "write 1 0 3 2 1 1 0 12 2 0 4 7 +1000, write 1 0 0 15 1 1 2 9 +1000, "
    "write 0 1 3 15 0 1 2 12 0 0 2 3 1 0 2 9 +100, lose_answers 2 +30",
    "rows without versions": "186 index full records: write 0 1 4 8 +30, write 0 0 0 1 1 0 1 12 1 0 "
    "0 9 +0, write 2 0 1 11 +100, write 3 0 0 3 +100, freeze_run 3 +1000",
    "fence open": "43 warehouse full records: write 1 0 4 15 +300, write 1 0 0 5 3 1 1 0 "
    "0 1 1 5 3 1 4 3 +0, save +0, resend 0 +1000, go_back +0, write 0 1 0 "
    "0 +1000",
    "cache's fence open": "68 cache full transactions: write 0 1 4 14 +1000, save +0, write 1 1 "
    "4 13 +300, go_back +0, write 0 0 1 15 0 1 2 8 2 0 0 3 1 0 1 15 +0, "
    "save +300",
    "rollback of the server unnoticed": "298 warehouse full transactions: write 1 1 2 4 +300, save +0, write 0 "
    "0 4 11 +1000, go_back +0, write 0 0 0 2 +300",
    "wrong generation written": "279 index full records: write 0 0 4 8 0 0 3 5 +0, rebuild 1 +3, "
    "freeze_run 47 +0",
    "change of a key leaves the old row": "0 index default transactions: write 0 1 1 7 0 0 0 13 3 0 0 1 +0",
    "row lost by the connector": "0 index default transactions: write 2 1 3 13 1 0 2 11 +0, truncate 0 "
    "+0, write 0 1 1 7 0 0 0 13 3 0 0 1 +0",
    "connector's offset before its records": "0 index default transactions: write 0 0 0 6 1 1 0 8 0 0 0 4 +0",
}
"""Of planted bugs, see `planted`."""
