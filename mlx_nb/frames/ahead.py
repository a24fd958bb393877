"""Rows that have been read and wait for the engine, those with a common beginning until it is prefilled.

The prefixes they share are held in the engine's prefix cache from here: as long as rows go on to use them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..engine.core import EngineCore
from .sharing import Prefix, Work, plan

__all__ = ["Ahead"]


class Ahead:
    """A queue of rows and of prefixes to be prefilled before them. Used by one thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._ready: deque[Work | Prefix] = deque()
        self._behind: dict[Prefix, list[Work | Prefix]] = {}
        self._num_behind = 0
        self._held: list[Prefix] = []
        self._latest: set[Prefix] = set()

    def __len__(self) -> int:
        """What waits, for the engine or a prefix."""
        return len(self._ready) + self._num_behind

    def put(self, works: Iterable[Work]) -> None:
        """Take rows in that were read together."""
        works = list(works)
        new = plan(works, self._held)
        for prefix in new:
            self._core.hold_prefix(prefix.lead[: prefix.length])
            self._held.append(prefix)
            self._behind[prefix] = []
            self._queue(prefix, prefix.parent)
        self._latest = set()
        for work in _grouped(works):
            self._queue(work, work.prefix)
            if (prefix_used := work.prefix) is not None:
                prefix_used.use(1)
        for work in works:
            link = work.prefix
            while link is not None and link not in self._latest:
                self._latest.add(link)
                link = link.parent
        self._release(prefix for prefix in self._held if prefix not in self._latest)

    def pop(self) -> Work | Prefix | None:
        """What to run next; None if nothing is ready."""
        return self._ready.popleft() if self._ready else None

    def stored(self, prefix: Prefix) -> None:
        """A prefix has been prefilled, or can't be: what waited for it goes on."""
        prefix.stored = True
        waited = self._behind.pop(prefix)
        self._num_behind -= len(waited)
        self._ready.extend(waited)

    def ended(self, work: Work) -> None:
        """A row needs its prefix no more."""
        if work.prefix is not None:
            work.prefix.use(-1)
            if work.prefix not in self._latest:
                self._release([work.prefix])

    def close(self) -> None:
        """Let all prefixes go."""
        for prefix in self._held:
            self._core.hold_prefix(prefix.lead[: prefix.length], held=False)
        self._held.clear()

    def _queue(self, item: Work | Prefix, after: Prefix | None) -> None:
        if after is None or after.stored:
            self._ready.append(item)
        else:
            self._behind[after].append(item)
            self._num_behind += 1

    def _release(self, prefixes: Iterable[Prefix]) -> None:
        for prefix in [prefix for prefix in prefixes if prefix.stored and not prefix.rows]:
            self._held.remove(prefix)
            self._core.hold_prefix(prefix.lead[: prefix.length], held=False)


def _grouped(works: list[Work]) -> list[Work]:
    """In the caller's order, except that rows with a common prefix go together."""
    first: dict[Prefix | None, int] = {}
    for work in works:
        first.setdefault(work.prefix, work.position)
    return sorted(
        works, key=lambda work: (first[work.prefix] if work.prefix else work.position, work.position)
    )
