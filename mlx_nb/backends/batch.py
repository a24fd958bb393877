"""Text models in one continuous batch, over mlx-lm's BatchGenerator.

The only file that knows BatchGenerator, its private parts included (a contract test watches them): rows share
one sampler, so both of its batches must say which rows they sample next. Where an answer ends is decided above,
so rows run without end here until they are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from ..config import EngineConfig
from ..errors import ModelLoadError, RequestError
from ..footprint import KVFootprint
from ..outputs import TokenLogprob
from ..request import Request
from ..sampling import SamplingParams
from .base import CacheStats, Event, Fault, Memory, ModelInfo, Prefilled, Token
from .fit import device_memory
from .grammar import Grammars, grammar_source
from .loader import device_name
from .prefix_cache import PrefixCache
from .samplers import RowSampler
from .text import TokenizerCodec

__all__ = ["BatchBackend"]

log = logging.getLogger("mlx_nb")

ENDLESS = 1 << 62
FIRST_CHUNK = 128
SMALLEST_CHUNK = 64
"""Tokens of all rows together. A smaller chunk takes hardly less time: the weights are read once for each."""
PREFILL_ALONE = {"nemotron_h"}
"""Model types whose rows end with a wrong state when mlx-lm prefills them padded: its state-space layers are not
told the rows' lengths. A test tells when that is mended."""
CHUNK_S = 0.4
"""Seconds that a prefill chunk should take: other rows and aborts wait as long."""


class _Observed:
    """A model that shows its logits to the sampler; all else is the model's own."""

    def __init__(self, model: Any, sampler: RowSampler) -> None:
        self._model, self._sampler = model, sampler

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        logits: mx.array = self._model(*args, **kwargs)
        self._sampler.observe(logits)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Prefilling(PromptProcessingBatch):
    """Says which rows are at work, and which sample their first token."""

    def prompt(self, tokens: list[list[int]]) -> None:
        self.fallback_sampler.at_work = list(self.uids)
        for cache in self.prompt_cache:
            for part in getattr(cache, "caches", [cache]):
                # After a chunk of one token a sliding window is rotated, and mlx-lm's mask for more of them is then
                # off by one for rows with padding.
                if isinstance(part, BatchRotatingKVCache) and part.rotated:
                    part._temporal_order()
        super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        self.fallback_sampler.expect(list(self.uids))
        return super().generate(tokens)


class _Decoding(GenerationBatch):
    """Says which rows sample their next token."""

    def _step(self) -> Any:
        self.fallback_sampler.expect(list(self.uids))
        return super()._step()


@dataclass(frozen=True, slots=True)
class _Row:
    """A request in the batch, with the tokens that came from the prefix cache and where to checkpoint."""

    request: Request
    cached: int
    boundaries: frozenset[int]


class BatchBackend:
    """See `base.Backend`.

    Parameters
    ----------
    model, tokenizer
        As mlx-lm loads them, every array evaluated on the thread that made it (`loader.evaluate`).
    info : ModelInfo, optional
        What the loader found out.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: EngineConfig, info: ModelInfo | None = None
    ) -> None:
        scheduler = config.scheduler_config
        if scheduler.max_kv_size:
            raise ModelLoadError(
                "max_kv_size is not supported in a batch: a bounded cache gives other text there. Leave it at 0"
            )
        blank = make_prompt_cache(model)
        unfit = sorted({type(c).__name__ for c in blank if not hasattr(c, "merge")})
        if unfit:
            raise ModelLoadError(
                f"this model's cache ({', '.join(unfit)}) can't be batched by mlx-lm: choose another model"
            )
        self.info = info or _describe(model, config.model_name)
        self.codec = TokenizerCodec(tokenizer, _vocabulary_size(model, tokenizer))
        self.check = functools.partial(_check, self.codec)
        self._model = model
        self._config = config
        self._trimmable = all(map(_keeps_all, blank))
        self._limit = int(config.gpu_memory_utilization * device_memory())
        self._weights = self.info.weight_bytes or _weight_bytes(model)
        self.footprint = _measure(model)
        self.kv_budget = self._limit - self._weights
        if self.kv_budget <= 0:
            raise ModelLoadError(
                f"the model's weights take {self._weights / 2**30:.1f} GiB, and the engine may use "
                f"{self._limit / 2**30:.1f} GiB: choose a smaller model, or raise gpu_memory_utilization"
            )
        self._prefix = self._make_prefix_cache()
        self._grammars = Grammars(self.codec)
        self._sampler = RowSampler()
        self._rows: dict[int, _Row] = {}
        self._uids: dict[str, int] = {}
        self._prefill_seen = (0, 0.0)
        self._generator = self._make_generator(self._sampler)

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
        fingerprint = self.info.fingerprint or _fingerprint(self._model, self.codec)
        return PrefixCache(int(budget), fingerprint, quantize if scheduler.kv_cache_quantization else None)

    def _make_generator(self, sampler: RowSampler) -> BatchGenerator:
        scheduler = self._config.scheduler_config
        alone = getattr(self._model, "model_type", None) in PREFILL_ALONE
        generator = BatchGenerator(
            _Observed(self._model, sampler),
            sampler=sampler,
            completion_batch_size=scheduler.max_running,
            prefill_batch_size=1 if alone else min(scheduler.prefill_batch_size, scheduler.max_running),
            prefill_step_size=min(FIRST_CHUNK, scheduler.prefill_step_size),
        )
        bound = scheduler.prefill_step_size
        generator._prompt_batch = _Prefilling.empty(generator.model, sampler, prefill_step_size=bound)
        generator._generation_batch = _Decoding.empty(generator.model, sampler)
        return generator

    # -- requests ---------------------------------------------------------------------------------------

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """Take a request in, on top of the longest prefix that is stored."""
        tokens = [*request.prompt_token_ids, *made]
        constraint = None
        if request.params.constraint is not None:
            constraint = self._grammars.constraint(request.params, request.prompt_token_ids)
            for token in made:
                constraint.advance(token)
        state, covered = self._prefix.fetch(tokens) if self._prefix else (None, 0)
        boundaries = self._boundaries(request, len(tokens) - 1)
        cuts = sorted({covered, *(b for b in boundaries if b > covered), len(tokens)})
        (uid,) = self._generator.insert_segments(
            [[tokens[a:b] for a, b in itertools.pairwise(cuts)]],
            max_tokens=[ENDLESS],
            caches=[state],
            all_tokens=[tokens[:covered]],
        )
        self._sampler.add(uid, request, constraint, made)
        self._rows[uid] = _Row(request, covered, boundaries)
        self._uids[request.request_id] = uid

    def _boundaries(self, request: Request, last: int) -> frozenset[int]:
        """Where to checkpoint the prefill of tokens up to `last`.

        At what the caller named and, for states that can't be trimmed later, at the last place from which the
        same prompt can be resumed.
        """
        if self._prefix is None:
            return frozenset()
        wanted = {request.prefix_boundary} | (set() if self._trimmable else {last})
        return frozenset(b for b in wanted if 0 < b <= last)

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """Drop rows; with `keep`, their states become prefixes."""
        uids = [self._uids[i] for i in request_ids if i in self._uids]
        if not uids:
            return
        if keep:
            self._checkpoint(uids)
        self._generator.remove(uids)
        for uid in uids:
            self._forget(uid)
        if not self._rows:
            mx.clear_cache()

    def _forget(self, uid: int) -> None:
        row = self._rows.pop(uid, None)
        if row is not None:
            del self._uids[row.request.request_id]
        self._sampler.discard(uid)

    def next(self) -> list[Event]:
        """One decode step and at most one prefill chunk."""
        prompts, tokens = self._generator.next()
        self._adapt_chunk()
        events: list[Event] = []
        for response in prompts:
            row = self._rows[response.uid]
            done, total = (row.cached + count for count in response.progress)
            events.append(Prefilled(row.request.request_id, done, total, row.cached))
            if response.end_of_segment and done in row.boundaries:
                self._checkpoint([response.uid])
        # A row at fault in sampling its next token has this one still, which may well be its last.
        for response in tokens:
            request = self._rows[response.uid].request
            logprob = _logprob(request, response) if request.params.logprobs is not None else None
            events.append(Token(request.request_id, response.token, logprob))
        return events + self._drop_faulty()

    def _checkpoint(self, uids: list[int]) -> None:
        """Store the states of some rows; what goes wrong here costs a later prompt time, and nobody an answer."""
        if self._prefix is None:
            return
        try:
            for state, tokens in self._generator.extract_cache(uids).values():
                self._prefix.store(list(tokens), state)
        except Exception:
            log.exception("mlx_nb: could not store a prefix")

    def _drop_faulty(self) -> list[Event]:
        faults = dict(self._sampler.faults)
        events: list[Event] = [
            Fault(self._rows[uid].request.request_id, error) for uid, error in faults.items()
        ]
        if faults:
            self._generator.remove(list(faults))
            for uid in faults:
                self._forget(uid)
        return events

    def reset(self) -> list[str]:
        """Begin again with an empty batch. A prompt that fails spares the rows in decode, and the other way round."""
        at_work = set(self._sampler.at_work)
        spared = [row.request.request_id for uid, row in self._rows.items() if uid not in at_work]
        with contextlib.suppress(Exception):  # it is broken anyway
            self._generator.close()
        self._rows.clear()
        self._uids.clear()
        self._sampler = RowSampler()
        self._generator = self._make_generator(self._sampler)
        self._prefill_seen = (0, 0.0)
        mx.clear_cache()
        return spared if at_work else []

    def _adapt_chunk(self) -> None:
        """Size the next prefill chunk from the speed of the last one.

        It doubles or halves at most: the speed of small chunks says little about large ones, and on a GPU the
        first chunk of a kind takes the time of a compiler.
        """
        counters, seen = self._generator._counters, self._prefill_seen
        self._prefill_seen = (counters.prompt_tokens, counters.prompt_time)
        tokens, seconds = counters.prompt_tokens - seen[0], counters.prompt_time - seen[1]
        rows = max(1, len(self._generator._prompt_batch))
        smallest = max(1, SMALLEST_CHUNK // rows)
        if tokens < SMALLEST_CHUNK // 2 or seconds <= 0:  # the end of a prompt, which tells nothing
            return
        ideal = int(tokens / seconds * CHUNK_S / rows)
        now, bound = self._generator.prefill_step_size, self._config.scheduler_config.prefill_step_size
        self._generator.prefill_step_size = min(max(ideal, now // 2, smallest), 2 * now, bound)

    def warm_up(self) -> None:
        """Run a few tokens through a batch of its own, one row and several."""
        for rows in sorted({1, min(4, self._config.scheduler_config.max_running)}):
            sampler = RowSampler()
            generator = self._make_generator(sampler)
            for uid in generator.insert([[0] * FIRST_CHUNK] * rows, max_tokens=[ENDLESS] * rows):
                sampler.add(uid, Request(f"warm-{uid}", [0], SamplingParams(), seed=0, arrival=0.0))
            made = 0
            while made < 3 * rows:
                made += len(generator.next()[1])
            generator.close()
        mx.clear_cache()

    def reserve(self, kv_bytes: int) -> None:
        """Evict prefixes that stand in the way of the rows' caches."""
        if self._prefix is not None:
            self._prefix.shrink(self.kv_budget - kv_bytes)

    # -- memory and caches ------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes in use now."""
        return Memory(
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            limit=self._limit,
            weights=self._weights,
            kv=int(self._generator.prompt_cache_nbytes) if self._rows else 0,
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
        return self._prefix.load(folder) if self._prefix else 0

    def close(self) -> None:
        """Let go of the model."""
        self._generator.close()
        del self._generator, self._model, self._prefix, self._sampler
        mx.clear_cache()


def _check(codec: TokenizerCodec, request: Request) -> None:
    """Refuse what can't be honoured."""
    params = request.params
    if params.constraint is not None:
        grammar_source(params)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token_id in ids or ():
            if token_id >= codec.vocabulary_size:
                raise RequestError(f"{name}: the model has no token {token_id}")


def _measure(model: Any) -> KVFootprint:
    """What a row costs, read off the caches after one token (which warms the model up as well)."""
    states = make_prompt_cache(model)
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


def _logprob(request: Request, response: Any) -> TokenLogprob:
    logprobs, count = response.logprobs, request.params.logprobs or 0
    top: dict[int, float] = {}
    if count:
        count = min(count, logprobs.shape[-1])
        ids = mx.argpartition(-logprobs, count - 1)[:count]
        values = logprobs[ids]
        pairs: Any = zip(ids.tolist(), values.tolist(), strict=True)  # type: ignore[arg-type]
        top = dict(sorted(pairs, key=lambda pair: -pair[1]))
    return TokenLogprob(response.token, float(logprobs[response.token].item()), top)


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
