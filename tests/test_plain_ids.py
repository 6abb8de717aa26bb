"""Lists of plain ints become arrays, and no others do."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from twostroke.plain_ids import plain_ids, plain_lists

LOOKS_LIKE_AN_INT = b"i\x01\x00\x00\x00"
"""What marshal writes for 1."""

INTS = st.one_of(st.integers(0, 300), st.integers(-(2**31), 2**31 - 1))
OBJECTS = st.one_of(
    INTS,
    st.integers(),
    st.booleans(),
    st.floats(),
    st.none(),
    st.binary(),
    st.text(),
    st.just(LOOKS_LIKE_AN_INT),
    st.builds(object),
    st.integers(0, 9).map(np.int64),
    st.recursive(INTS, st.lists, max_leaves=4),
)


def lists_of(objects):
    ids = st.lists(objects, max_size=8)
    return st.lists(st.one_of(ids, ids.map(tuple)), max_size=5)


def is_plain(ids):
    return all(type(one) is int and -(2**31) <= one < 2**31 for one in ids)


@given(st.one_of(lists_of(INTS), lists_of(OBJECTS)))
@example([[], []])
@example([[1, True], [1]])
@example([[True] * 5])
@example([[1], [[], 2]])
@example([[LOOKS_LIKE_AN_INT[:-1]], [LOOKS_LIKE_AN_INT]])
@example([[1], "ab"])
def test_plain_ints_and_nothing_else(lists):
    found = plain_lists(lists)
    if not all(isinstance(ids, list | tuple) and is_plain(ids) for ids in lists):
        assert found is None
        return
    assert [ids.tolist() for ids in found] == [list(ids) for ids in lists]
    assert all(ids.dtype == np.int32 for ids in found)


def test_one_object_that_comes_again_is_as_good_as_many():
    number = 10**6
    ids = [number] * 3
    assert [found.tolist() for found in plain_lists([ids, ids])] == [ids, ids]


def test_any_sequence_of_ints():
    assert plain_ids(range(3)).tolist() == [0, 1, 2]
    assert plain_ids(np.arange(3)) is None


def test_what_does_not_begin_and_end_with_an_int_is_not_written_out(monkeypatch):
    """Chats may be long, and lists that share others grow beyond all bounds."""
    monkeypatch.setattr("twostroke.plain_ids.marshal.dumps", None)
    assert plain_lists([[1, 2], [{"role": "user", "content": "a" * 10**6}]]) is None
    assert plain_lists([[1, [2]]]) is None
    assert plain_lists([["a", 1]]) is None
