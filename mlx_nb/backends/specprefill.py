"""Sparse prefill: only the parts of a long prompt that matter, at their true positions.

After SpecPrefill (Liu, Chen and Zhang 2025, arXiv:2502.02789). A small draft model reads the whole prompt and looks a
few tokens ahead; how much those attend to each token of the prompt is that token's importance. The target then
prefills the most important chunks alone, and decodes on from the prompt's end. The answer is an approximation.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import ModelLoadError
from .caches import is_recurrent

__all__ = [
    "CHUNK",
    "LOOKAHEAD",
    "POOL",
    "Run",
    "Scoring",
    "SparseCache",
    "choose",
    "require_scorer",
    "require_sparse",
    "sparse",
]

LOOKAHEAD = 8
"""Steps of the draft whose attention counts: that of the prompt's last token, and of those it says next."""
POOL = 13
"""Tokens over which importance is averaged, so that words and not tokens are chosen."""
CHUNK = 32
"""Tokens that are kept or left out together."""

Run = tuple[int, int]


class SparseCache(KVCache):
    """Keys and values of some tokens. `offset` is the position of the next one, `held` how many there are."""

    def __init__(self, full: KVCache | None = None) -> None:
        super().__init__()
        self.held = 0
        if full is not None and full.keys is not None:
            self.keys, self.values = full.keys, full.values
            self.offset = self.held = full.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """As of any cache; positions of what is held don't matter here, since rotation has been applied."""
        with _HeldAsOffset(self):
            made = super().update_and_fetch(keys, values)
        self.offset += keys.shape[2]
        return made

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Of the tokens that are held and those that come now."""
        with _HeldAsOffset(self):
            return super().make_mask(*args, **kwargs)

    def size(self) -> int:
        """Tokens held."""
        return self.held

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens, which must stand side by side."""
        n = min(self.held, n)
        self.held -= n
        self.offset -= n
        return n


class _HeldAsOffset:
    """While it lasts, a sparse cache's offset is where its next token is stored."""

    def __init__(self, cache: SparseCache) -> None:
        self._cache = cache

    def __enter__(self) -> None:
        cache = self._cache
        self._position, cache.offset = cache.offset, cache.held

    def __exit__(self, *_: object) -> None:
        cache = self._cache
        cache.held, cache.offset = cache.offset, self._position


def sparse(state: Sequence[Any]) -> list[Any]:
    """Caches that go on from `state` (which is used up), and may leave tokens out."""
    return [SparseCache(cache) if type(cache) is KVCache else cache for cache in state]


def require_sparse(model: Any) -> None:
    """ModelLoadError for a target whose tokens can't be given their positions."""
    if getattr(model, "attends_both_ways", False):
        raise ModelLoadError("SpecPrefill needs prompts that are read from left to right: leave it out")
    blank = make_prompt_cache(model)
    odd = sorted({type(c).__name__ for c in blank if type(c) is not KVCache and not is_recurrent(c)})
    if odd or not any(type(c) is KVCache for c in blank):
        raise ModelLoadError(
            f"SpecPrefill needs plain attention, and this model has {', '.join(odd) or 'none'}: leave it out"
        )
    near, far = (_first_keys(model, position) for position in (0, 7))
    if mx.allclose(near, far).item():
        raise ModelLoadError(
            "SpecPrefill needs positions that follow the cache, as Llama's and Qwen's: leave it out"
        )


def _first_keys(model: Any, position: int) -> mx.array:
    state = sparse(make_prompt_cache(model))
    caches = [cache for cache in state if isinstance(cache, SparseCache)]
    for cache in caches:
        cache.offset = position
    model(mx.array([[1]]), cache=state)
    keys: mx.array = caches[0].keys[..., :1, :]
    return keys


def choose(
    scores: Sequence[float], keep_pct: float, backbone_pct: float = 0.0, chunk: int = CHUNK
) -> list[Run]:
    """The runs of tokens to keep, as (begin, end), in order.

    Of n chunks, ceil(keep_pct * n) are kept: the last one, floor(backbone_pct * n) spread evenly, and then those with
    the highest mean of the smoothed scores, an earlier one before a later one.
    """
    tokens = len(scores)
    if not tokens:
        return []
    smooth = _smoothed(np.asarray(scores, dtype=np.float64))
    begins = range(0, tokens, chunk)
    means = np.array([smooth[begin : begin + chunk].mean() for begin in begins])
    count = len(means)
    wanted = max(1, math.ceil(keep_pct * count - 1e-9))
    backbone = min(wanted, math.floor(backbone_pct * count + 1e-9))
    kept = {count - 1, *(i * count // backbone for i in range(backbone))}
    for i in np.argsort(-means, kind="stable").tolist():
        if len(kept) >= wanted:
            break
        kept.add(i)
    runs: list[Run] = []
    for i in sorted(kept):
        begin, end = i * chunk, min((i + 1) * chunk, tokens)
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _smoothed(scores: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Mean over `POOL` neighbours, of as many as there are at the edges."""
    half = POOL // 2
    sums = np.concatenate([[0.0], np.cumsum(scores)])
    places = np.arange(len(scores))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(scores))
    smooth: np.ndarray[Any, np.dtype[np.float64]] = (sums[end] - sums[begin]) / (end - begin)
    return smooth


class Scoring:
    """The draft's reading of one prompt.

    Parameters
    ----------
    model
        The draft, as mlx-lm loads it; `require_scorer` has seen it.
    tokens
        The prompt.
    """

    def __init__(self, model: Any, tokens: Sequence[int]) -> None:
        self._model, self._tokens = model, list(tokens)
        self._state = make_prompt_cache(model)
        self._fed = 0

    def feed(self, count: int) -> int:
        """Read up to `count` tokens more; how many are left before `scores` may be asked for."""
        last = len(self._tokens) - 1
        end = min(last, self._fed + count)
        if end > self._fed:
            self._model(mx.array([self._tokens[self._fed : end]]), cache=self._state)
            mx.eval([cache.state for cache in self._state])
            self._fed = end
        return last - self._fed

    def scores(self) -> list[float]:
        """Importance of each token of the prompt but the last.

        The attention that it gets, at most, from any head of any layer, on average over the steps that look ahead.
        """
        length = len(self._tokens) - 1
        total = mx.zeros((length,))
        token = mx.array([self._tokens[-1:]])
        for _ in range(LOOKAHEAD):
            with _Recorded() as seen:
                logits = self._model(token, cache=self._state)
            token = mx.argmax(logits[:, -1:, :], axis=-1)
            total = total + _attention(seen, length)
            mx.eval(total, token)
        values: list[float] = (total / LOOKAHEAD).tolist()  # type: ignore[assignment]
        return values


def _attention(seen: list[tuple[mx.array, mx.array, float]], length: int) -> mx.array:
    best = mx.zeros((length,))
    for queries, keys, scale in seen:
        if keys.shape[2] <= length:  # a sliding window: it can't tell of the whole prompt
            continue
        heads, groups = queries.shape[1], keys.shape[1]
        grouped = queries.astype(mx.float32).reshape(groups, heads // groups, -1)
        weights = mx.softmax(scale * (grouped @ keys[0].astype(mx.float32).swapaxes(-1, -2)), axis=-1)
        best = mx.maximum(best, weights[..., :length].max(axis=(0, 1)))
    return best


def require_scorer(model: Any) -> None:
    """ModelLoadError for a draft model whose attention can't be seen."""
    for module in _attention_modules(model):
        attend = module.scaled_dot_product_attention
        if not getattr(attend, "recorded", False):
            module.scaled_dot_product_attention = _recorded(attend)
    with _Recorded() as seen:
        model(mx.array([[1, 2, 3]]), cache=make_prompt_cache(model))
    if not any(keys.shape[2] == 3 for _, keys, _ in seen):
        raise ModelLoadError(
            "SpecPrefill can't see this draft model's attention: choose a Llama- or Qwen-like one"
        )


def _attention_modules(model: Any) -> Iterator[Any]:
    """The modules of mlx-lm in which a part of `model` calls attention."""
    names = {type(part).__module__ for part in model.modules()}
    return (
        sys.modules[name]
        for name in sorted(names)
        if hasattr(sys.modules[name], "scaled_dot_product_attention")
    )


_thread = threading.local()


class _Recorded:
    """What attention is called with, on this thread, while it lasts: queries, keys and scale of each layer."""

    def __enter__(self) -> list[tuple[mx.array, mx.array, float]]:
        seen: list[tuple[mx.array, mx.array, float]] = []
        _thread.seen = seen
        return seen

    def __exit__(self, *_: object) -> None:
        _thread.seen = None


def _recorded(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """mlx-lm's attention, which no model hands out, with a look at what goes in."""

    def recording(queries: mx.array, keys: Any, values: Any, *args: Any, **kwargs: Any) -> mx.array:
        seen = getattr(_thread, "seen", None)
        if seen is not None and isinstance(keys, mx.array):
            seen.append((queries, keys, kwargs["scale"]))
        return attend(queries, keys, values, *args, **kwargs)

    recording.recorded = True  # type: ignore[attr-defined]
    return recording
