"""Sequences of tokens in order, against looking at each of them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mlx_nb.backends.keys import Key, Keys, common

TOKENS = st.lists(st.integers(-1, 2), min_size=1, max_size=6).map(tuple)


def shared(one: Key, two: Key) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def keys_of(stored: set[Key]) -> Keys:
    keys = Keys()
    for key in stored:
        keys.add(key)
    return keys


@given(st.sets(TOKENS), TOKENS)
def test_prefixes_are_all_there_are_the_longest_first(stored: set[Key], tokens: Key) -> None:
    expected = sorted((key for key in stored if tokens[: len(key)] == key), key=len, reverse=True)
    assert list(keys_of(stored).prefixes(tokens)) == expected


@given(st.sets(TOKENS), TOKENS)
def test_nothing_begins_more_alike_than_what_is_found(stored: set[Key], tokens: Key) -> None:
    found = keys_of(stored).alike(tokens)
    assert all(count == shared(key, tokens) for key, count in found)
    assert max((count for _, count in found), default=0) == max(
        (shared(key, tokens) for key in stored), default=0
    )


@given(st.sets(TOKENS), st.data())
def test_what_is_removed_is_found_no_more(stored: set[Key], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from(sorted(stored)))) if stored else set()
    keys = keys_of(stored)
    for key in gone:
        keys.remove(key)
    for key in stored:
        assert (next(keys.prefixes(key), None) == key) is (key not in gone)


@given(st.integers(0, 200), st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
def test_what_two_have_in_common(length: int, more: int, other: int, known: int) -> None:
    one, two = list(range(length)) + [-1] * more, list(range(length)) + [-2] * other
    assert common(one, two, min(known, length)) == length
