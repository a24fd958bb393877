"""Which rows begin alike, so that what they share is prefilled once.

Prefixes form a tree: all rows of a template share its beginning, and some of them more (one long text, several
questions). Works on token ids alone; touches no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..backends.keys import common
from ..engine.intake import Prompt
from .outcome import Ask

__all__ = ["Prefix", "Work", "plan"]

LEAST = 32
"""Tokens that a prefix is longer than the one it continues: fewer aren't worth the copy of a state."""
GAIN = 128
"""Tokens that a prefix must save in the rows at hand."""


@dataclass(eq=False, slots=True)
class Prefix:
    """The first `length` of the `lead` tokens; one more stands behind them, since something must be left to feed."""

    lead: list[int]
    length: int
    parent: Prefix | None
    rows: int = 0
    stored: bool = False

    def begins(self, tokens: list[int]) -> bool:
        """Whether a prompt begins with it and goes on."""
        return len(tokens) > self.length and tokens[: self.length] == self.lead[: self.length]

    def use(self, rows: int) -> None:
        """Count rows that rely on it, and on what it continues."""
        self.rows += rows
        if self.parent is not None:
            self.parent.use(rows)


@dataclass(eq=False, slots=True)
class Work:
    """A row to run: `tokens` of its prompt, if they are known, and the prefix it shares with others."""

    position: int
    ask: Ask
    key: bytes | None
    tokens: list[int] | None = None
    prefix: Prefix | None = field(default=None, repr=False)

    @property
    def prompt(self) -> Prompt:
        """What to submit."""
        return self.ask.prompt if self.tokens is None else self.tokens


def plan(works: Sequence[Work], known: Sequence[Prefix]) -> list[Prefix]:
    """Give rows the longest prefix each shares, one that is `known` or a new one; the new ones, parents first."""
    found: list[Prefix] = []
    groups: dict[Prefix | None, list[Work]] = {}
    by_length = sorted(known, key=lambda prefix: -prefix.length)
    for work in works:
        if (tokens := work.tokens) is not None:
            work.prefix = next((prefix for prefix in by_length if prefix.begins(tokens)), None)
            groups.setdefault(work.prefix, []).append(work)
    for prefix, group in groups.items():
        group.sort(key=_tokens)
        length = prefix.length if prefix else 0
        shared = [common(_tokens(one), _tokens(two), length) for one, two in itertools.pairwise(group)]
        _grow(group, shared, prefix, length + LEAST, found)
    return found


def _tokens(work: Work) -> list[int]:
    return work.tokens or []


def _grow(
    works: list[Work], shared: list[int], parent: Prefix | None, least: int, found: list[Prefix]
) -> None:
    """Find what runs of sorted rows have in common beyond `least` tokens; `shared` is that of neighbours."""
    begin = 0
    while begin < len(shared):
        if shared[begin] < least:
            begin += 1
            continue
        end = begin
        while end < len(shared) and shared[end] >= least:
            end += 1
        run, its_shared = works[begin : end + 1], shared[begin:end]
        length = min(*its_shared, *(len(_tokens(work)) - 1 for work in run))
        more = length - (parent.length if parent else 0)
        prefix = parent
        if length >= least and more * (len(run) - 1) >= GAIN:
            prefix = Prefix(_tokens(run[0])[: length + 1], length, parent)
            found.append(prefix)
            for work in run:
                work.prefix = prefix
        _grow(run, its_shared, prefix, min(its_shared) + (LEAST if prefix is not parent else 1), found)
        begin = end
