"""Documents as the text of their members, in bytes: no value changes on the way."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.codec.members import complete, joined, members
from cdc.codec.problem import Unreadable
from tests.support.budget import budget
from tests.unit.test_patch import LAYER, NAMES, SCALARS, SPACES, TEXT, VALUES, model, object_of, text_of


def texts(document: bytes) -> dict[str, str]:
    return {name: bytes(value).decode() for name, value in members(document).items()}


@given(pairs=st.lists(st.tuples(TEXT, VALUES), max_size=6, unique_by=lambda pair: pair[0]), spaces=SPACES)
@budget(150)
def test_members_give_back_the_very_text(pairs: list[tuple[str, str]], spaces: list[str]) -> None:
    document = object_of([(json.dumps(name), value) for name, value in pairs], spaces).encode()
    expected = {name: value.strip(" \t\r\n") for name, value in pairs}
    assert texts(document) == expected
    assert texts(joined(members(document))) == expected


BROKEN = [b"", b"7", b"[]", b'{"a":1', b'{"a"}', b'{"a":}', b"{a:1}", b'"{}"', b'{"a":1 "b":2}', b'{"a":NaN}', b"{} {}"]
BROKEN += [b'{"a":01}', b'{"a":"\n"}', b'{"\xff":1}', b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"]


@pytest.mark.parametrize("text", BROKEN)
def test_anything_else_is_an_error(text: bytes) -> None:
    with pytest.raises(Unreadable):
        members(text)


def test_of_a_member_twice_the_last_counts() -> None:
    assert texts(b'{"a":1,"b":2,"a":3.0}') == {"a": "3.0", "b": "2"}


@given(
    row=st.dictionaries(NAMES, SCALARS, max_size=5),
    missing=st.frozensets(NAMES, min_size=1),
    older=st.lists(st.one_of(LAYER, LAYER, st.just((None, frozenset()))), max_size=5),
)
@budget(400)
def test_complete_equals_a_model_of_dicts(row: dict[str, str], missing: frozenset[str], older: Any) -> None:
    document = text_of({**row, **dict.fromkeys(missing, "null")}).encode()
    layers = [(None if held is None else text_of(held).encode(), list(lacking)) for held, lacking in older]
    made = complete(document, sorted(missing), iter(layers))
    assert (None if made is None else texts(made)) == model(row, missing, older)


def test_a_number_is_never_rounded() -> None:
    made = complete(b'{"id":1,"v":null}', ["v"], [(b'{"v":12345678901234567890.10}', ())])
    assert made == b'{"id":1,"v":12345678901234567890.10}'


def test_a_whole_document_stays_as_it_is() -> None:
    assert complete(b'{"id": 1}', (), []) == b'{"id": 1}'


def test_no_older_one_is_read_in_vain() -> None:
    def older() -> Any:
        yield b'{"v":1}', ()
        raise AssertionError

    assert complete(b'{"v":null}', ["v"], older()) == b'{"v":1}'
