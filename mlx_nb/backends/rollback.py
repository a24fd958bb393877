"""Takes back tokens that a cache was fed on trial.

A cache that keeps every token is cut back. One that doesn't (recurrent, or a sliding window) is put back to where it
was before the trial, and the tokens to keep are fed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, RotatingKVCache

from .caches import is_recurrent

__all__ = ["Trial", "cuts", "trial_objection"]


def cuts(state: Sequence[Any]) -> bool:
    """Whether such caches can always be cut back."""
    return all(map(_cuts, _parts(state)))


def trial_objection(state: Sequence[Any]) -> str | None:
    """Why tokens can't be tried on such caches; None if they can."""
    odd = sorted({type(c).__name__ for c in _parts(state) if not (_cuts(c) or _copies(c))})
    return f"its cache ({', '.join(odd)}) can't take tokens back" if odd else None


class Trial:
    """Caches before they are fed tokens of which some may have to go again.

    Parameters
    ----------
    state : list
        The caches; the list stays, its items may be replaced.
    tokens : int
        How many will be fed.
    """

    def __init__(self, state: list[Any], tokens: int) -> None:
        self._state, self._tokens = state, tokens
        self._before = [None if cuts([c]) else copy.deepcopy(c) for c in state]

    def keep(self, tokens: int, feed: Callable[[int], None]) -> None:
        """Keep the first `tokens` of those that were fed; ``feed(tokens)`` feeds them once more if it must be."""
        if tokens == self._tokens:
            return
        whole = all(before is None for before in self._before)
        for i, before in enumerate(self._before):
            if before is None:
                self._state[i].trim(self._tokens - tokens if whole else self._tokens)
            else:
                self._state[i] = before
        if not whole and tokens:
            feed(tokens)


def _parts(state: Sequence[Any]) -> list[Any]:
    return [part for cache in state for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]


def _cuts(cache: Any) -> bool:
    """Whether it can always be cut back: a sliding window can't once something has left it."""
    return bool(cache.is_trimmable()) and not hasattr(cache, "max_size")


def _copies(cache: Any) -> bool:
    return isinstance(cache, RotatingKVCache) or is_recurrent(cache)
