"""The rules of `cdc.readiness` beyond one fault each: which servers are good, what stops a registration,
and how a fault is an error.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cdc.errors import SourceError
from cdc.model.finding_codes import KINDS
from cdc.readiness.checks import Fault, check_server, check_source, refuse
from cdc.readiness.facts import RESTRICTIVE, PublicationFacts, RoleFacts
from tests.unit.test_doctor import ORDERS, SOURCE, TABLE


def faults(**changes: Any) -> Iterator[Fault]:
    return check_source(replace(SOURCE, **changes))


def keys(**changes: Any) -> list[str]:
    return [fault.key for fault in faults(**changes)]


@pytest.mark.parametrize(
    ("version", "level", "encoding", "expected"),
    [
        (180006, "replica", "UTF8", ["setting-differs/wal_level"]),
        (150000, "minimal", "UTF8", ["setting-differs/wal_level"]),
        (190000, "minimal", "UTF8", ["setting-differs/wal_level"]),
        (130010, "logical", "UTF8", ["source-unfit/version"]),
        (180006, "logical", "SQL_ASCII", ["source-unfit/encoding"]),
        (140000, "logical", "UTF8", []),
        (180006, "logical", "LATIN1", []),
        (190000, "replica", "UTF8", []),
        (190001, "logical", "UTF8", []),
    ],
)
def test_servers_that_can_be_captured_from(
    version: int, level: str, encoding: str, expected: list[str]
) -> None:
    assert [fault.key for fault in check_server(version, level, encoding)] == expected


def test_a_virtual_column_beside_a_large_one_is_named_before_migrate_refuses_it() -> None:
    """`migrate` would have to set REPLICA IDENTITY FULL, so it is no fix."""
    wide = replace(ORDERS, virtual=("v",), toastable=True, lean=True)
    assert keys(tables={TABLE: wide}) == ["table-refused"]
    assert keys(tables={TABLE: replace(ORDERS, virtual=("v",), lean=True)}) == []
    assert keys(tables={TABLE: replace(ORDERS, virtual=("v",), full=True)}) == ["table-refused"]


def test_what_migrate_cannot_mend_is_named_before_it_runs() -> None:
    tables = {TABLE: replace(ORDERS, hidden_by="permissive", unlogged=TABLE, unwatched=True)}
    before = list(faults(control=False, role=None, publication=None, tables=tables))
    assert [fault.key for fault in before] == ["control-missing", "table-unlogged", "row-security"]
    assert before[-1].fix.startswith('CREATE ROLE "cdc_shop"; CREATE POLICY ')


def test_a_publication_for_all_tables_is_somebody_elses() -> None:
    """`migrate` refuses it, so it is no fix of what the publication has too much."""
    tables = (*(SOURCE.publication.tables if SOURCE.publication else ()), "public.other")
    everything = PublicationFacts("owner", True, True, True, tables)
    (fault,) = faults(publication=everything)
    assert fault.key == "publication-foreign"
    assert "DROP PUBLICATION shop" in fault.error.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"user": "cdc_shop", "role": RoleFacts(superuser=True)},
        {"reader_name": "cdc_shop", "role": RoleFacts(superuser=True)},
        {"role": RoleFacts(superuser=True, bootstrap=True)},
        {"tables": {TABLE: replace(ORDERS, owner="cdc_shop")}},
    ],
)
def test_a_role_that_migrate_takes_nothing_from(changes: dict[str, Any]) -> None:
    (fault,) = faults(**changes)
    assert (fault.key, fault.stops) == ("role-unfit/shared", False)
    assert fault.error.hint == KINDS[fault.key].decision


def test_register_stops_at_what_is_down_and_at_hidden_rows() -> None:
    hidden = replace(ORDERS, hidden_by=RESTRICTIVE)
    assert [fault.stops for fault in faults(tables={TABLE: hidden})] == [True]
    assert [fault.stops for fault in faults(role=None)] == [True]
    assert [fault.stops for fault in faults(role=RoleFacts(superuser=True))] == [False]
    assert [fault.stops for fault in faults(tables={TABLE: replace(ORDERS, lean=True)})] == []


def test_a_fault_is_an_error_with_its_key_and_what_a_person_has_to_do() -> None:
    with pytest.raises(SourceError) as caught:
        refuse(faults(role=None))
    error = caught.value
    assert (error.finding_key, error.hint) == ("role-unfit/missing", "cdc -p FILE migrate")
    assert error.details == {"subject": "cdc_shop"}
    (foreign,) = faults(slots=(replace(SOURCE.slots[0], plugin="wal2json"),))
    assert foreign.error.hint == KINDS["slot-foreign"].decision
    refuse(faults())
