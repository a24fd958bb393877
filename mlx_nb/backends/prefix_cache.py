"""KV states of earlier requests, found again by the tokens they cover, and what the model saw in their pictures.

Entries are keyed by token ids (looks at pictures by their content), evicted by true LRU under one byte budget, and
never shared with a live row: a row works on a copy. A state that can be trimmed serves any prompt that shares a
beginning with it; one that can't (recurrent or wrapped) serves only prompts that continue it.
"""

from __future__ import annotations

import copy
import json
import logging
import operator
import os
import shutil
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    QuantizedKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

from ..errors import CacheMismatchError
from .base import CacheStats
from .keys import Key, Keys

__all__ = ["Look", "PrefixCache", "shortened"]

log = logging.getLogger("mlx_nb")

State = list[Any]
Look = dict[str, mx.array]
"""What was seen in a picture; evaluated arrays that nobody changes."""
MANIFEST = "prefix_cache.json"


class PrefixCache:
    """Not thread-safe: used on the engine thread.

    Parameters
    ----------
    max_bytes : int
    fingerprint : str
        Of model, tokenizer and adapter; saved folders carry it.
    quantize : tuple of int, optional
        (bits, group size) for stored keys and values; lossy.
    max_entries : int, optional
        How many at most; None leaves it to the bytes.
    """

    def __init__(
        self,
        max_bytes: int,
        fingerprint: str,
        quantize: tuple[int, int] | None = None,
        max_entries: int | None = None,
    ) -> None:
        self.stats = CacheStats(max_bytes=max_bytes)
        self._fingerprint = fingerprint
        self._quantize = quantize
        self._max_entries = max_entries
        self._entries: dict[Key, State] = {}
        self._looks: dict[str, Look] = {}
        self._order: OrderedDict[Key | str, None] = OrderedDict()  # of both, the least recently used first
        self._keys = Keys()
        self._trimmable = Keys()
        self._holds: Counter[Key] = Counter()

    def hold(self, tokens: Sequence[int], *, held: bool) -> None:
        """Evict the entry of exactly these tokens last, whether it is here yet or not; or as any other again."""
        key = tuple(tokens)
        self._holds[key] += 1 if held else -1
        if self._holds[key] <= 0:
            del self._holds[key]

    def covers(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` `fetch` would cover."""
        return self._nearest(tokens)[1]

    def fetch(self, tokens: Sequence[int]) -> tuple[State | None, int]:
        """A copy of the state that covers most of `tokens`, but the last, and how many it covers."""
        key, covered = self._nearest(tokens)
        if key is None:
            self.stats.misses += 1
            return None, 0
        self._order.move_to_end(key)
        state = self._unpack(copy.deepcopy(self._entries[key]))
        if covered < len(key):
            trim_prompt_cache(state, len(key) - covered)
        self.stats.hits += 1
        self.stats.tokens_saved += covered
        return state, covered

    def _nearest(self, tokens: Sequence[int]) -> tuple[Key | None, int]:
        # One token must be left to feed: its logits are the next step.
        fed = tuple(tokens[:-1])
        best: tuple[Key | None, int] = (None, 0)
        for shorter in self._keys.prefixes(fed):
            best = (shorter, len(shorter))
            break
        for longer, shared in self._trimmable.alike(fed):
            if shared > best[1]:
                best = (longer, shared)
        return best

    def store(self, tokens: Sequence[int], state: State) -> bool:
        """Keep a state that covers exactly `tokens`, if the budget allows. The cache owns it from here on."""
        key = tuple(tokens)
        if not key:
            return False
        state = self._pack(state)
        # Own memory, not a view into the batch it came from; the next step need not wait for the copies.
        mx.async_eval([c.state for c in state])  # type: ignore[no-untyped-call]
        size = _nbytes(state)
        if size > self.stats.max_bytes:
            return False
        if key in self._entries:
            self._drop(key)
        self._entries[key] = state
        self._order[key] = None
        if can_trim_prompt_cache(state):
            # What a longer state covers, it can serve by trimming.
            for shorter in list(self._keys.prefixes(key)):
                if shorter not in self._holds:
                    self._drop(shorter)
            self._trimmable.add(key)
        self._keys.add(key)
        self.stats.current_bytes += size
        self.shrink(self.stats.max_bytes)
        return True

    def sizes(self) -> list[tuple[int, int]]:
        """Tokens and bytes of each entry, the least recently used first."""
        return [(len(key), _nbytes(self._entries[key])) for key in self._order if isinstance(key, tuple)]

    # -- looks ------------------------------------------------------------------------------------------

    def look(self, name: str) -> Look | None:
        """What the model saw in the picture of that name, if it is still known."""
        found = self._looks.get(name)
        if found is None:
            self.stats.vision_misses += 1
            return None
        self._order.move_to_end(name)
        self.stats.vision_hits += 1
        return found

    def store_look(self, name: str, look: Look) -> None:
        """Keep what the model saw in a picture, if the budget allows; evaluated arrays that nobody changes."""
        size = sum(array.nbytes for array in look.values())
        if name in self._looks or size > self.stats.max_bytes:
            return
        self._looks[name] = look
        self._order[name] = None
        self.stats.current_bytes += size
        self.shrink(self.stats.max_bytes)

    # -- eviction ---------------------------------------------------------------------------------------

    def shrink(self, max_bytes: int) -> None:
        """Evict what was least recently used until what is left is within `max_bytes`."""
        while self._order and self.stats.current_bytes > max_bytes:
            self._evict(self._order)
        if self._max_entries is not None:
            while len(self._entries) > self._max_entries:
                self._evict(key for key in self._order if isinstance(key, tuple))
        self._count()

    def _evict(self, candidates: Iterable[Key | str]) -> None:
        """Drop the first, or of those that are not held if there are any."""
        keys = list(candidates)
        key = next((key for key in keys if key not in self._holds), keys[0])
        if isinstance(key, str):
            del self._order[key]
            self.stats.current_bytes -= sum(array.nbytes for array in self._looks.pop(key).values())
        else:
            self._drop(key)
        self.stats.evictions += 1

    def clear(self) -> None:
        """Forget all entries; counters stay."""
        self._entries.clear()
        self._looks.clear()
        self._order.clear()
        self._keys, self._trimmable = Keys(), Keys()
        self.stats.current_bytes = 0
        self._count()

    def _drop(self, key: Key) -> None:
        self._keys.remove(key)
        del self._order[key]
        state = self._entries.pop(key)
        if can_trim_prompt_cache(state):
            self._trimmable.remove(key)
        self.stats.current_bytes -= _nbytes(state)
        self._count()

    def _count(self) -> None:
        self.stats.entry_count, self.stats.vision_entries = len(self._entries), len(self._looks)

    def _pack(self, state: State) -> State:
        if self._quantize is None:
            return state
        bits, group = self._quantize
        return [
            c.to_quantized(group_size=group, bits=bits)
            if type(c) is KVCache
            and c.keys is not None
            and c.keys.shape[-1] % group == c.values.shape[-1] % group == 0
            else c
            for c in state
        ]

    def _unpack(self, state: State) -> State:
        return [_dequantized(c) if isinstance(c, QuantizedKVCache) else c for c in state]

    # -- disk -------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> bool:
        """Write all states to `folder`, replacing what it held, at once or not at all."""
        if not self._entries:
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            files = []
            for number, key in enumerate(key for key in self._order if isinstance(key, tuple)):
                name = f"{number:05d}.safetensors"
                state = [_of_mlx_lm(cache) for cache in self._entries[key]]
                save_prompt_cache(str(draft / name), state, {"tokens": json.dumps(key)})
                files.append(name)
            manifest = {"format": 1, "fingerprint": self._fingerprint, "files": files}
            (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            _replace_folder(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

    def load(self, folder: Path, blank: State | None = None) -> int:
        """Add the entries saved in `folder`; how many. They become of the classes of a `blank` state, if given."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            fingerprint, files = manifest["fingerprint"], manifest["files"]
        except FileNotFoundError:
            raise CacheMismatchError(
                f"{folder} holds no saved prefix cache: give the folder it was saved to"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise CacheMismatchError(
                f"{folder / MANIFEST} is damaged ({error}): save the cache again"
            ) from error
        if fingerprint != self._fingerprint:
            raise CacheMismatchError(
                f"{folder} was saved by another model, tokenizer or adapter: save one for this model"
            )
        loaded = 0
        for name in files:
            try:
                state, metadata = load_prompt_cache(str(folder / name), return_metadata=True)
                tokens = [operator.index(token) for token in json.loads(metadata["tokens"])]
                if not tokens:
                    raise ValueError("it covers no tokens")
                mx.eval([c.state for c in state])
                if blank is not None:
                    state = [_of_class(type(own), cache) for own, cache in zip(blank, state, strict=True)]
            except Exception as error:
                log.warning("mlx_nb: skipped the damaged cache entry %s (%s)", folder / name, error)
                continue
            loaded += self.store(tokens, state)
        return loaded


def shortened(state: State, count: int) -> State:
    """The same state without its last `count` tokens, in no more memory than it needs."""
    trim_prompt_cache(state, count)
    for cache in state:
        for part in getattr(cache, "caches", [cache]):
            if type(part) is KVCache:
                part.keys, part.values = map(mx.contiguous, part.keys_and_values())
    return state


def _of_mlx_lm(cache: Any) -> Any:
    """A cache that mlx-lm can save: mlx-vlm has a class of its own for recurrent states."""
    return _of_class(ArraysCache, cache)


def _of_class(wanted: type, cache: Any) -> Any:
    """A recurrent state in that class; any other cache as it is."""
    if type(cache) is wanted or not type(cache).__name__ == wanted.__name__ == "ArraysCache":
        return cache
    other = wanted(len(cache.cache))
    other.cache = list(cache.cache)
    return other


def _nbytes(state: State) -> int:
    return sum(int(c.nbytes) for c in state)


def _dequantized(packed: QuantizedKVCache) -> KVCache:
    cache = KVCache()
    cache.keys, cache.values = (
        mx.dequantize(weight, scales, biases, group_size=packed.group_size, bits=packed.bits)
        for weight, scales, biases in (packed.keys, packed.values)
    )
    cache.offset = packed.offset
    return cache


def _replace_folder(draft: Path, folder: Path) -> None:
    """Move `draft` to `folder`. A crash in between leaves the old folder under its set-aside name."""
    if not folder.exists():
        draft.rename(folder)
        return
    if not (folder / MANIFEST).exists() and any(folder.iterdir()):
        raise CacheMismatchError(f"{folder} holds other files: give a new or empty folder")
    aside = folder.with_name(f".{folder.name}-old-{os.getpid()}")
    folder.rename(aside)
    draft.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)
