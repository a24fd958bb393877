"""Prefixes that a job holds: evicted last, and as any other once it lets go."""

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_nb.backends.prefix_cache import PrefixCache

TOKEN_BYTES = 2 * 4 * 4


def store(cache: PrefixCache, tokens: list[int]) -> None:
    """Store a state that covers so many tokens."""
    state = KVCache()
    length = len(tokens)
    state.keys, state.values, state.offset = mx.zeros((1, 1, length, 4)), mx.zeros((1, 1, length, 4)), length
    cache.store(tokens, [state])


def covered(cache: PrefixCache, tokens: list[int]) -> int:
    """Return how much of a prompt is stored."""
    return cache.fetch([*tokens, 99])[1]


def test_a_held_prefix_outlives_newer_ones() -> None:
    cache = PrefixCache(25 * TOKEN_BYTES, "model")
    held = [1] * 10
    cache.hold(held, held=True)
    store(cache, held)
    for token in range(2, 6):
        store(cache, [token] * 10)

    assert covered(cache, held) == 10
    assert covered(cache, [5] * 10) == 10
    assert covered(cache, [4] * 10) == 0


def test_a_prefix_that_was_let_go_is_evicted_in_its_turn() -> None:
    cache = PrefixCache(25 * TOKEN_BYTES, "model")
    held = [1] * 10
    for _ in range(2):  # two jobs
        cache.hold(held, held=True)
    store(cache, held)
    cache.hold(held, held=False)
    for token in (2, 3):
        store(cache, [token] * 10)
    assert cache.stats.entry_count == 2
    cache.hold(held, held=False)
    store(cache, [4] * 10)

    assert covered(cache, held) == 0


def test_a_longer_state_does_not_take_a_held_ones_place() -> None:
    cache = PrefixCache(1000 * TOKEN_BYTES, "model")
    cache.hold([1] * 10, held=True)
    store(cache, [1] * 10)
    store(cache, [1] * 20)
    cache.shrink(10 * TOKEN_BYTES)

    assert cache.stats.entry_count == 1
    assert covered(cache, [1] * 10 + [2]) == 10


def test_rows_in_want_of_memory_come_before_held_prefixes() -> None:
    cache = PrefixCache(1000 * TOKEN_BYTES, "model")
    cache.hold([1] * 10, held=True)
    store(cache, [1] * 10)
    cache.shrink(0)

    assert cache.stats.current_bytes == cache.stats.entry_count == 0


def test_letting_go_of_what_is_not_there_does_nothing() -> None:
    cache = PrefixCache(1000 * TOKEN_BYTES, "model")
    cache.hold([1] * 10, held=False)
    store(cache, [1] * 10)

    assert covered(cache, [1] * 10) == 10
