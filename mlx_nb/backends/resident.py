"""A model in memory: what it is, what it costs, and what it has stored of earlier prompts.

What backends that make tokens have in common. Knows nothing of rows, steps or batches.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from ..config import EngineConfig
from ..errors import ModelLoadError, RequestError
from ..footprint import KVFootprint
from ..request import Request
from .base import CacheStats, Memory, ModelInfo
from .fit import device_memory
from .grammar import Constraint, Grammars, grammar_source
from .loader import device_name
from .prefix_cache import PrefixCache
from .text import TokenizerCodec
from .vision import Looking
from .vision_inputs import MediaReader

__all__ = ["Resident"]


class Resident:
    """The part of `base.Backend` that concerns the model itself.

    Parameters
    ----------
    model, tokenizer
        As mlx-lm loads them, every array evaluated on the thread that made it (`loader.evaluate`).
    info : ModelInfo, optional
        What the loader found out.
    reader : MediaReader, optional
        Of a model that sees.
    """

    prefills_sparsely = False
    """Whether `Request.sparse_prefill` can be honoured."""

    max_prefixes: int | None = None
    """How many prefixes are stored at most; None leaves it to their bytes."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        info: ModelInfo | None = None,
        reader: MediaReader | None = None,
    ) -> None:
        self.info = info or _describe(model, config.model_name)
        self.codec = TokenizerCodec(tokenizer, _vocabulary_size(model, tokenizer), reader)
        if not self.info.fingerprint:
            self.info = replace(self.info, fingerprint=_fingerprint(model, self.codec))
        self.check = functools.partial(_check, self.codec, self.prefills_sparsely)
        self._model = model
        self._config = config
        blank = self._blank()
        self._trimmable = all(map(_keeps_all, blank))
        self._limit = int(config.gpu_memory_utilization * device_memory())
        self._weights = self.info.weight_bytes or _weight_bytes(model)
        self.footprint = _measure(model, blank)
        self.kv_budget = self._limit - self._weights
        if self.kv_budget <= 0:
            raise ModelLoadError(
                f"the model's weights take {self._weights / 2**30:.1f} GiB, and the engine may use "
                f"{self._limit / 2**30:.1f} GiB: choose a smaller model, or raise gpu_memory_utilization"
            )
        self._prefix = self._make_prefix_cache()
        self._grammars = Grammars(self.codec)

    def _make_prefix_cache(self) -> PrefixCache | None:
        scheduler = self._config.scheduler_config
        if not scheduler.enable_prefix_cache:
            return None
        budget = (
            scheduler.cache_memory_percent * self._limit
            if scheduler.cache_memory_mb is None
            else scheduler.cache_memory_mb * 2**20
        )
        quantize = (scheduler.kv_cache_quantization_bits, scheduler.kv_cache_quantization_group_size)
        quantized = quantize if scheduler.kv_cache_quantization else None
        return PrefixCache(int(budget), self.info.fingerprint, quantized, self.max_prefixes)

    def _blank(self) -> list[Any]:
        """Caches of a new row."""
        states: list[Any] = make_prompt_cache(self._model)
        return states

    def _whole(self, request: Request) -> Request:
        """The request as the model takes it."""
        if getattr(self._model, "attends_both_ways", False):
            whole: Request = self._model.whole(request)
            return whole
        return request

    def _look_at(
        self, request: Request, made: Sequence[int], state: list[Any] | None, covered: int
    ) -> Looking:
        """What comes first of a prompt with pictures that `state`, its `covered` tokens, doesn't have."""
        state = state or self._blank()
        return Looking(request, tuple(made), state, covered, covered, request.prefix_boundary)

    def _constraint(self, request: Request, made: Sequence[int]) -> Constraint | None:
        """What a structured answer must keep to, after the tokens it has `made`; None if it has no structure."""
        if request.params.constraint is None:
            return None
        constraint = self._grammars.constraint(request.params, request.prompt_token_ids)
        for token in made:
            constraint.advance(token)
        return constraint

    def _boundaries(self, request: Request, last: int) -> frozenset[int]:
        """Where to checkpoint the prefill of tokens up to `last`.

        At what the caller named and, for states that can't be trimmed later, at the last place from which the
        same prompt can be resumed if it is to be kept.
        """
        if self._prefix is None:
            return frozenset()
        wanted = {request.prefix_boundary} | ({last} if request.keep and not self._trimmable else set())
        return frozenset(b for b in wanted if 0 < b <= last)

    def reserve(self, kv_bytes: int) -> None:
        """Evict prefixes that stand in the way of the rows' caches."""
        if self._prefix is not None:
            self._prefix.shrink(self.kv_budget - kv_bytes)

    def hold_prefix(self, tokens: Sequence[int], *, held: bool) -> None:
        """See `PrefixCache.hold`."""
        if self._prefix is not None:
            self._prefix.hold(tokens, held=held)

    def report(self) -> dict[str, dict[str, Any]]:
        """Blocks that only this backend has in ``get_stats``."""
        return {}

    def wake(self) -> None:
        """A step waits for nothing."""

    def _kv_bytes(self) -> int:
        """Bytes that the caches of running rows hold."""
        raise NotImplementedError

    def memory(self) -> Memory:
        """Bytes in use now."""
        return Memory(
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            limit=self._limit,
            weights=self._weights,
            kv=self._kv_bytes(),
            prefix=self._prefix.stats.current_bytes if self._prefix else 0,
        )

    def cache_stats(self) -> CacheStats | None:
        """A copy of the counters."""
        if self._prefix is None:
            return None
        stats = self._prefix.stats
        return CacheStats(**{name: getattr(stats, name) for name in stats.__slots__})

    def clear_prefix_cache(self) -> None:
        """Forget stored prefixes; MLX's pool goes back to the system."""
        if self._prefix is not None:
            self._prefix.clear()
        mx.clear_cache()

    def clear_runtime_caches(self) -> dict[str, Any]:
        """Bytes freed: of stored prefixes and of MLX's pool."""
        prefix = self._prefix.stats.current_bytes if self._prefix else 0
        if self._prefix is not None:
            self._prefix.clear()
        pool = mx.get_cache_memory()
        mx.clear_cache()
        return {"prefix_cache_bytes": prefix, "pool_bytes": pool}

    def save_cache(self, folder: Path) -> bool:
        """See `PrefixCache.save`."""
        return self._prefix.save(folder) if self._prefix else False

    def load_cache(self, folder: Path) -> int:
        """See `PrefixCache.load`."""
        return self._prefix.load(folder, self._blank()) if self._prefix else 0

    def close(self) -> None:
        """Let go of the model."""
        del self._model, self._prefix
        mx.clear_cache()


def _check(codec: TokenizerCodec, sparse_prefill: bool, request: Request) -> None:
    """Refuse what can't be honoured."""
    params = request.params
    if request.sparse_prefill is not None and not sparse_prefill:
        raise RequestError(
            "this engine has no draft model for SpecPrefill: leave it out, or give SimpleEngine one"
        )
    if params.constraint is not None:
        grammar_source(params)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids or ():
            if token_id >= codec.vocabulary_size:
                raise RequestError(f"{name}: the model has no token {token_id}")


def _measure(model: Any, states: list[Any]) -> KVFootprint:
    """What a row costs, read off its caches after one token (which warms the model up as well)."""
    model(mx.zeros((1, 1), dtype=mx.uint32), cache=states)
    mx.eval([c.state for c in states])
    per_token = fixed = 0
    windows = []
    pending = list(states)
    while pending:
        cache = pending.pop()
        if isinstance(cache, CacheList):
            pending += cache.caches
        elif isinstance(cache, RotatingKVCache):
            windows.append((cache.nbytes // cache.keys.shape[2], cache.max_size))
        elif isinstance(cache, KVCache):
            per_token += cache.nbytes // cache.keys.shape[2] if cache.keys is not None else 0
        else:
            fixed += int(cache.nbytes)
    return KVFootprint(per_token, tuple(windows), fixed)


def _keeps_all(cache: Any) -> bool:
    """Whether a state can always be cut back later: a sliding window can't once it has wrapped."""
    parts = getattr(cache, "caches", [cache])
    return all(part.is_trimmable() and not hasattr(part, "max_size") for part in parts)


def _arrays(model: Any) -> Iterable[mx.array]:
    from mlx.utils import tree_flatten

    return (array for _, array in tree_flatten(model.parameters()))


def _fingerprint(model: Any, codec: TokenizerCodec) -> str:
    """Of a model object that was handed over: the beginning of each of its arrays, and what the tokenizer does."""
    digest = hashlib.sha256()
    for array in _arrays(model):
        digest.update(f"{array.shape} {array.dtype} {array.reshape(-1)[:16].tolist()}".encode())
    digest.update(repr(codec.encode("The tokenizer's fingerprint: 1234567890, ä, 😀")).encode())
    return digest.hexdigest()[:32]


def _weight_bytes(model: Any) -> int:
    return sum(array.nbytes for array in _arrays(model))


def _describe(model: Any, name: str) -> ModelInfo:
    """What can be told of a model object that was handed over."""
    args = getattr(model, "args", None)
    length = getattr(args, "max_position_embeddings", None)
    kinds = {str(array.dtype).removeprefix("mlx.core.") for array in _arrays(model)}
    return ModelInfo(
        name=name or str(getattr(args, "model_type", "")),
        precision=kinds.pop() if len(kinds) == 1 else "mixed",
        backend=device_name(),
        weight_bytes=_weight_bytes(model),
        context_length=length if isinstance(length, int) else None,
    )


def _vocabulary_size(model: Any, tokenizer: Any) -> int:
    args = getattr(model, "args", None)
    text = getattr(args, "text_config", None)
    for size in (
        getattr(args, "vocab_size", None),
        text.get("vocab_size") if isinstance(text, dict) else None,
    ):
        if isinstance(size, int):
            return size
    return len(tokenizer)
