"""Stored states in a batch, with room to grow."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from mlx_nb.backends.roomy import only, roomy


def state(length: int, seed: int = 0) -> KVCache:
    """Return a cache of so many tokens."""
    mx.random.seed(seed)
    cache = KVCache()
    if length:
        cache.update_and_fetch(mx.random.normal((1, 2, length, 4)), mx.random.normal((1, 2, length, 6)))
    return cache


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (3, 7, 1), (256, 255), (4, 0, 2)], ids=str)
def test_rows_are_merged_as_mlx_lm_merges_them(lengths: tuple[int, ...]) -> None:
    states = [state(length, seed) for seed, length in enumerate(lengths)]
    expected = BatchKVCache.merge(states)

    (cache,) = roomy([states[0]])
    merged = cache.merge(states)

    for ours, theirs in zip(merged.keys_and_values(), expected.keys_and_values(), strict=True):
        assert mx.array_equal(ours, theirs)
    assert merged.left_padding.tolist() == expected.left_padding.tolist()
    assert merged.offset.tolist() == expected.offset.tolist()
    news = mx.ones((len(lengths), 2, 3, 4)), mx.ones((len(lengths), 2, 3, 6))
    for ours, theirs in zip(merged.update_and_fetch(*news), expected.update_and_fetch(*news), strict=True):
        assert mx.array_equal(ours, theirs)


def test_there_is_room_for_the_next_tokens() -> None:
    (cache,) = roomy([state(5)])
    merged = cache.merge([cache, cache])
    room = merged.keys.shape[2]

    merged.update_and_fetch(mx.ones((2, 2, 9, 4)), mx.ones((2, 2, 9, 6)))

    assert merged.keys.shape[2] == room >= 14


@pytest.mark.parametrize("length", [5, 256, 300])
def test_a_row_goes_into_a_batch_of_its_own_and_out_again_without_a_copy(length: int) -> None:
    (cache,) = roomy([state(length)])
    merged = cache.merge([cache])
    (out,) = only([merged])

    assert cache.keys is merged.keys is out.keys
    assert cache.values is merged.values is out.values
    assert out.offset == length
    for ours, theirs in zip(out.keys_and_values(), merged.extract(0).keys_and_values(), strict=True):
        assert mx.array_equal(ours, theirs)


def test_what_is_cut_back_a_lot_takes_no_more_than_it_needs() -> None:
    long = state(2000)
    long.trim(1995)
    (cache,) = roomy([long])

    assert cache.merge([cache]).keys.shape[2] < 600


def test_a_row_with_padding_and_other_states_are_copied_out() -> None:
    (cache,) = roomy([state(5)])
    merged = cache.merge([cache, state(3, 1)])
    merged.filter([1])
    merged.left_padding, merged.keys = (
        merged.left_padding + 1,
        mx.pad(merged.keys, [(0, 0), (0, 0), (1, 0), (0, 0)]),
    )
    merged.values, merged._idx = mx.pad(merged.values, [(0, 0), (0, 0), (1, 0), (0, 0)]), merged._idx + 1

    (out,) = only([merged])

    for ours, theirs in zip(out.keys_and_values(), state(3, 1).keys_and_values(), strict=True):
        assert mx.array_equal(ours, theirs)
    window = RotatingKVCache(8)
    window.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 4)))
    (out,) = only([window.merge([window])])
    assert (type(out), out.offset) == (RotatingKVCache, 3)


def test_other_states_stay_as_they_are() -> None:
    window, empty = RotatingKVCache(8), KVCache()

    assert roomy([window, empty]) == [window, empty]
    assert roomy(None) is None
