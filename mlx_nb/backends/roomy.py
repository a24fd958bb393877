"""States joined into a batch with room for what comes next, and the state of a row that is alone in one.

mlx-lm merges rows into arrays that just hold them, and the first new token then copies every one. A state that goes
into a batch by itself, or out of it, need not be copied at all: it is the one that holds the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

__all__ = ["only", "roomy"]


class _RoomyKVCache(KVCache):
    """Of one row; `merge` is what differs."""

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> BatchKVCache:
        """A batch of the rows, which end together, as long as whole steps of growth."""
        longest = max(cache.size() for cache in caches)
        batch = BatchKVCache([longest - cache.size() for cache in caches])
        room = (longest // cls.step + 1) * cls.step
        some = next(cache for cache in caches if cache.keys is not None)
        for name in ("keys", "values"):
            _, heads, held, size = getattr(some, name).shape
            if len(caches) == 1 and held <= room:
                setattr(batch, name, getattr(some, name))
                continue
            rows = mx.zeros((len(caches), heads, room, size), some.keys.dtype)
            for row, cache in enumerate(caches):
                if (own := getattr(cache, name)) is not None:
                    rows[row, :, longest - cache.size() : longest] = own[0, :, : cache.size()]
            setattr(batch, name, rows)
        batch.offset += longest
        batch._idx = longest
        return batch


def roomy(state: list[Any] | None) -> list[Any] | None:
    """The same state, with room to grow where it keeps every token."""
    return state and [_with_room(cache) for cache in state]


def _with_room(cache: Any) -> Any:
    if type(cache) is not KVCache or cache.keys is None:
        return cache
    other = _RoomyKVCache()
    other.keys, other.values, other.offset = cache.keys, cache.values, cache.offset
    return other


def only(batch: list[Any]) -> list[Any]:
    """The caches of a batch's one row, which has left it: they take over what arrays they can."""
    return [_only(cache) for cache in batch]


def _only(batch: Any) -> Any:
    if type(batch) is not BatchKVCache or batch.keys is None or batch.left_padding.tolist() != [0]:
        return batch.extract(0)
    cache = KVCache()
    cache.keys, cache.values, cache.offset = batch.keys, batch.values, batch.size()
    return cache
