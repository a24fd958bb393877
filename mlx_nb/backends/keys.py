"""Sequences of tokens in order, so that those which begin alike stand together.

A search compares a few neighbours, whatever is stored; it costs as much as the tokens that are shared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence

__all__ = ["Key", "Keys", "common"]

Key = tuple[int, ...]


class Keys:
    """A sorted set."""

    def __init__(self) -> None:
        self._sorted: list[Key] = []

    def add(self, key: Key) -> None:
        """Take in a key that is not here."""
        insort(self._sorted, key)

    def remove(self, key: Key) -> None:
        """Let one go that is."""
        place = bisect_left(self._sorted, key)
        assert self._sorted[place] == key
        del self._sorted[place]

    def prefixes(self, tokens: Key) -> Iterator[Key]:
        """Those that `tokens` begin with, or are, the longest first; to be exhausted before anything changes."""
        while place := bisect_right(self._sorted, tokens):
            # What begins the tokens begins all that stands between the two, too.
            before = self._sorted[place - 1]
            shared = common(before, tokens)
            if shared == len(before):
                yield before
                shared -= 1
            if shared <= 0:
                return
            tokens = tokens[:shared]

    def alike(self, tokens: Key) -> list[tuple[Key, int]]:
        """The one or two that begin most like `tokens`, and how many they share."""
        place = bisect_left(self._sorted, tokens)
        return [(key, common(key, tokens)) for key in self._sorted[max(0, place - 1) : place + 1]]


def common(one: Sequence[int], two: Sequence[int], known: int = 0) -> int:
    """How many tokens two sequences of one type share, of which `known` are known."""
    most = min(len(one), len(two))
    good, step = known, 16
    while good < most and one[good : good + step] == two[good : good + step]:
        good = min(good + step, most)
        step *= 2
    while step > 1 and good < most:
        step //= 2
        if good + step <= most and one[good : good + step] == two[good : good + step]:
            good += step
    return good
