"""Stored prefixes: found by the tokens they cover, evicted by recency and bytes, never shared, kept on disk."""

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_nb import CacheMismatchError
from mlx_nb.backends.prefix_cache import MANIFEST, PrefixCache

WIDTH = 4


def kv(tokens: list[int]) -> list[Any]:
    """A state that tells which tokens it covers: each one's id is its key and value."""
    cache = KVCache()
    columns = mx.broadcast_to(
        mx.array(tokens, dtype=mx.float32)[None, None, :, None], (1, 1, len(tokens), WIDTH)
    )
    cache.update_and_fetch(columns, -columns)
    return [cache]


def recurrent(tokens: list[int]) -> list[Any]:
    """A state that can't be cut back."""
    cache = ArraysCache(1)
    cache[0] = mx.array([[float(sum(tokens))]])
    return [cache]


def covered(state: list[Any]) -> list[int]:
    part = state[0]
    keys, values = (array[..., : part.offset, :] for array in (part.keys, part.values))
    assert mx.array_equal(keys, -values)
    ids: list[int] = keys[0, 0, :, 0].astype(mx.int32).tolist()
    return ids


def cache(max_bytes: int = 2**20, **options: Any) -> PrefixCache:
    return PrefixCache(max_bytes, "this model", **options)


def size(tokens: list[int]) -> int:
    return sum(int(part.nbytes) for part in kv(tokens))


ABC = [1, 2, 3, 4, 5]


def test_nothing_is_found_in_an_empty_cache() -> None:
    prefixes = cache()
    assert prefixes.fetch(ABC) == (None, 0)
    assert prefixes.fetch([1]) == (None, 0)
    assert (prefixes.stats.misses, prefixes.stats.hits) == (2, 0)


def test_a_prompt_that_goes_on_finds_what_it_begins_with() -> None:
    prefixes = cache()
    prefixes.store(ABC, kv(ABC))
    state, count = prefixes.fetch([*ABC, 6, 7])
    assert count == 5
    assert covered(state) == ABC
    assert (prefixes.stats.hits, prefixes.stats.tokens_saved, prefixes.stats.entry_count) == (1, 5, 1)


def test_an_exact_hit_leaves_one_token_to_feed() -> None:
    prefixes = cache()
    prefixes.store(ABC, kv(ABC))
    state, count = prefixes.fetch(ABC)
    assert count == 4
    assert covered(state) == ABC[:4]


def test_prompts_that_part_share_the_longest_common_prefix() -> None:
    prefixes = cache()
    prefixes.store([1, 2, 3, 9, 9, 9], kv([1, 2, 3, 9, 9, 9]))
    prefixes.store([1, 7], kv([1, 7]))
    state, count = prefixes.fetch([1, 2, 3, 4, 5])
    assert count == 3
    assert covered(state) == [1, 2, 3]
    assert prefixes.fetch([8, 8]) == (None, 0)


def test_the_longest_of_several_wins() -> None:
    prefixes = cache()
    for length in (2, 4):
        tokens = [*ABC[:length], 50 + length]
        prefixes.store(tokens, kv(tokens))
    assert prefixes.fetch([*ABC, 6])[1] == 4


def test_what_a_longer_state_covers_is_kept_once() -> None:
    prefixes = cache()
    prefixes.store(ABC[:3], kv(ABC[:3]))
    prefixes.store(ABC, kv(ABC))
    assert prefixes.stats.entry_count == 1
    assert prefixes.stats.current_bytes == size(ABC)
    assert covered(prefixes.fetch([1, 2, 3, 8])[0]) == [1, 2, 3]


def test_storing_again_replaces() -> None:
    prefixes = cache()
    for _ in range(3):
        prefixes.store(ABC, kv(ABC))
    assert (prefixes.stats.entry_count, prefixes.stats.current_bytes) == (1, size(ABC))


def test_a_state_that_cant_be_cut_back_serves_only_what_goes_on_from_it() -> None:
    prefixes = cache()
    prefixes.store(ABC[:3], recurrent(ABC[:3]))
    prefixes.store(ABC, recurrent(ABC))
    assert prefixes.stats.entry_count == 2
    assert prefixes.fetch([*ABC, 6])[1] == 5
    assert prefixes.fetch(ABC)[1] == 3
    assert prefixes.fetch([1, 2, 9]) == (None, 0)


def test_a_window_that_wrapped_is_never_cut_back() -> None:
    wrapped = RotatingKVCache(max_size=4)
    for token in ABC:
        column = mx.full((1, 1, 1, WIDTH), float(token))
        wrapped.update_and_fetch(column, -column)
    prefixes = cache()
    prefixes.store(ABC, [wrapped])
    assert prefixes.fetch(ABC) == (None, 0)
    assert prefixes.fetch([*ABC, 6])[1] == 5


def test_a_fetched_state_is_a_copy() -> None:
    prefixes = cache()
    prefixes.store(ABC, kv(ABC))
    state, _ = prefixes.fetch([*ABC, 6])
    column = mx.full((1, 1, 1, WIDTH), 99.0)
    state[0].update_and_fetch(column, -column)
    state[0].keys[...] = 0
    assert covered(prefixes.fetch([*ABC, 6])[0]) == ABC
    prefixes.store([7], recurrent([7]))
    short, _ = prefixes.fetch([1, 2, 8])
    assert covered(short) == [1, 2]
    assert covered(prefixes.fetch([*ABC, 6])[0]) == ABC


def test_the_least_recently_used_is_evicted_first() -> None:
    prefixes = cache(max_bytes=3 * size([1, 0]))
    for first in (1, 2, 3):
        prefixes.store([first, 0], kv([first, 0]))
    assert prefixes.fetch([1, 0, 5])[1] == 2  # used again, so 2 is the oldest now
    prefixes.store([4, 0], kv([4, 0]))
    assert prefixes.stats.evictions == 1
    assert [prefixes.fetch([first, 0, 5])[1] for first in (1, 2, 3, 4)] == [2, 0, 2, 2]


def test_bytes_stay_within_the_budget() -> None:
    prefixes = cache(max_bytes=2 * size([1] * 300))
    for first in range(8):
        tokens = [first, *range(20, 20 + 40 * first)]
        prefixes.store(tokens, kv(tokens))
        assert prefixes.stats.current_bytes <= prefixes.stats.max_bytes
        assert prefixes.stats.entry_count >= 1
    assert prefixes.stats.evictions > 0
    prefixes.shrink(0)
    assert (prefixes.stats.current_bytes, prefixes.stats.entry_count) == (0, 0)


def test_what_is_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    prefixes = cache(max_bytes=size([1]))
    prefixes.store([1], recurrent([1]))
    prefixes.store(list(range(2000)), kv(list(range(2000))))
    assert (prefixes.stats.entry_count, prefixes.stats.evictions) == (1, 0)


def test_a_budget_of_nothing_keeps_nothing() -> None:
    prefixes = cache(max_bytes=0)
    prefixes.store(ABC, kv(ABC))
    assert prefixes.fetch([*ABC, 6]) == (None, 0)


def test_clear_forgets_entries_and_keeps_counters() -> None:
    prefixes = cache()
    prefixes.store(ABC, kv(ABC))
    prefixes.fetch([*ABC, 6])
    prefixes.clear()
    assert prefixes.fetch([*ABC, 6]) == (None, 0)
    stats = prefixes.stats.as_dict()
    assert (stats["entry_count"], stats["current_memory_mb"], stats["hits"], stats["hit_rate"]) == (
        0,
        0,
        1,
        0.5,
    )
    prefixes.store(ABC, kv(ABC))
    assert prefixes.fetch([*ABC, 6])[1] == 5


def test_a_quantized_prefix_is_smaller_and_close() -> None:
    wide = KVCache()
    numbers = mx.random.normal((1, 1, 256, 64), key=mx.random.key(0))
    wide.update_and_fetch(numbers, numbers)
    prefixes = cache(quantize=(8, 64))
    tokens = list(range(256))
    prefixes.store(tokens, [wide])
    assert prefixes.stats.current_bytes < numbers.nbytes
    state, count = prefixes.fetch([*tokens[:200], 999])
    assert count == 200
    assert isinstance(state[0], KVCache)
    assert mx.allclose(state[0].keys[:, :, :200], numbers[:, :, :200], atol=0.05)


# -- disk -----------------------------------------------------------------------------------------------


def test_saved_entries_come_back(tmp_path: Path) -> None:
    first, second = cache(), cache()
    first.store(ABC, kv(ABC))
    first.store([7, 8], recurrent([7, 8]))
    assert first.save(tmp_path / "deep" / "folder")
    assert second.load(tmp_path / "deep" / "folder") == 2
    assert covered(second.fetch([*ABC, 6])[0]) == ABC
    assert second.fetch([7, 8, 9])[0][0][0].item() == 15


def test_an_empty_cache_saves_nothing(tmp_path: Path) -> None:
    assert cache().save(tmp_path / "folder") is False
    assert not (tmp_path / "folder").exists()


def test_saving_again_replaces_what_was_saved(tmp_path: Path) -> None:
    first, second = cache(), cache()
    first.store(ABC, kv(ABC))
    first.save(tmp_path / "folder")
    second.store([7, 8], kv([7, 8]))
    second.save(tmp_path / "folder")
    third = cache()
    assert third.load(tmp_path / "folder") == 1
    assert third.fetch([*ABC, 6]) == (None, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_save_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache()
    first.store(ABC, kv(ABC))
    first.save(tmp_path / "folder")
    first.store([7, 8], kv([7, 8]))

    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("mlx_nb.backends.prefix_cache.save_prompt_cache", full)
    with pytest.raises(OSError, match="full"):
        first.save(tmp_path / "folder")
    assert cache().load(tmp_path / "folder") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    prefixes = cache()
    prefixes.store(ABC, kv(ABC))
    with pytest.raises(CacheMismatchError, match="other files"):
        prefixes.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_another_models_folder_is_refused(tmp_path: Path) -> None:
    first = cache()
    first.store(ABC, kv(ABC))
    first.save(tmp_path / "folder")
    other = PrefixCache(2**20, "another model")
    with pytest.raises(CacheMismatchError, match="another model"):
        other.load(tmp_path / "folder")
    assert other.stats.entry_count == 0


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"fingerprint": "this model"}'])
def test_a_folder_that_is_no_saved_cache_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(CacheMismatchError):
        cache().load(tmp_path)


@pytest.mark.parametrize("damage", ["cut short", "gone", "garbage", "no tokens", "wrong tokens"])
def test_a_damaged_entry_is_skipped_with_a_warning_and_the_rest_load(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = cache()
    first.store([7, 8], kv([7, 8]))
    first.store(ABC, kv(ABC))
    first.save(tmp_path / "folder")
    name = json.loads((tmp_path / "folder" / MANIFEST).read_text())["files"][0]
    file = tmp_path / "folder" / name
    if damage == "cut short":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "gone":
        file.unlink()
    elif damage == "garbage":
        file.write_bytes(b"garbage" * 50)
    else:
        arrays, metadata = mx.load(str(file), return_metadata=True)
        value = json.dumps("text" if damage == "wrong tokens" else [])
        metadata = {k: value if v.startswith("[7") else v for k, v in metadata.items()}
        mx.save_safetensors(str(file), arrays, metadata)
    second = cache()
    with caplog.at_level(logging.WARNING, "mlx_nb"):
        assert second.load(tmp_path / "folder") == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text
    assert second.fetch([*ABC, 6])[1] == 5
    assert second.stats.entry_count == 1


def test_what_the_budget_does_not_allow_is_not_counted_as_loaded(tmp_path: Path) -> None:
    first = cache()
    first.store(ABC, kv(ABC))
    first.save(tmp_path / "folder")
    assert cache(max_bytes=1).load(tmp_path / "folder") == 0
