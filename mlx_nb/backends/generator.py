"""mlx-lm's BatchGenerator for rows that share one sampler, and that run without end until they are removed.

The only file that knows its private parts (a contract test watches them): both of its batches must say which rows
they sample next, and a row alone in decode leaves them, to go on over plain caches, until company comes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch, StopSequences
from mlx_lm.models.cache import BatchRotatingKVCache

from .chunks import ChunkSize
from .draws import normalized
from .lone import Lone, extracted
from .roomy import only, roomy
from .samplers import RowSampler

__all__ = ["Generator"]

ENDLESS = 1 << 62
_BY_ROW = (
    "uids", "prompt_cache", "tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences",
)  # fmt: skip


class _Observed:
    """A model that shows its logits to the sampler; all else is the model's own.

    One whose pictures shift positions is told by how much those of each row are.
    """

    def __init__(self, model: Any, sampler: RowSampler, shifts: Mapping[int, int]) -> None:
        self._model, self._sampler, self._shifts = model, sampler, shifts

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        if self._shifts:
            kwargs["shifted"] = [self._shifts.get(uid, 0) for uid in self._sampler.at_work]
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

    def split(self, indices: list[int]) -> Any:
        if len(indices) < len(self):
            return super().split(indices)
        whole = copy.copy(self)  # all go: no row's state need be copied
        for name in _BY_ROW:
            setattr(self, name, [])
        return whole

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        self.fallback_sampler.expect(list(self.uids))
        return super().generate(tokens)


class _Decoding(GenerationBatch):
    """Says which rows sample their next token, and evaluates log-probabilities only where someone asks for them."""

    _next_tokens: Any
    _next_logprobs: Any

    def _step(self) -> Any:
        sampler: RowSampler = self.fallback_sampler
        inputs: mx.array = self._next_tokens
        logprobs: list[mx.array | None] = self._next_logprobs
        sampler.expect(list(self.uids))
        scores = normalized(self.model(inputs[:, None], cache=self.prompt_cache)[:, -1, :])
        self._next_tokens = sampler(scores)
        self._next_logprobs = list(scores) if sampler.shows else [None] * len(self.uids)
        mx.async_eval(self._next_tokens, self._next_logprobs)  # type: ignore[no-untyped-call]
        tokens: Any = inputs.tolist()
        for before, token in zip(self.tokens, tokens, strict=True):
            before.append(token)
        return tokens, logprobs


class _Joining(GenerationBatch):
    """A row that brings its next token along, so that there is none to sample before it is in a batch."""

    def __init__(self, generator: BatchGenerator, row: Lone) -> None:
        token, logprobs = row.drawn
        caches = [cache.merge([cache]) for cache in roomy(row.state) or ()]
        common = [generator.sampler], generator.sampler, [()], [StopSequences()], [ENDLESS]
        super().__init__(generator.model, [row.uid], token, caches, [row.tokens], *common)
        self._next_logprobs = [logprobs]

    def _step(self) -> Any:
        return [], []


class Generator(BatchGenerator):
    """Rows in one continuous batch; one that is alone decodes over plain caches.

    Parameters
    ----------
    model
        As mlx-lm calls it.
    sampler : RowSampler
        Knows each row by the uid that it has here.
    shifts : mapping of int to int
        How far the positions of rows with pictures are shifted, by uid.
    rows : int
        How many may decode at once.
    prompts : int
        How many are prefilled side by side at most.
    chunk : int
        Tokens of one row that a prefill chunk takes at most.
    """

    prefill_step_size: int
    adapts = True
    """Whether prefill chunks are sized by the time they take."""

    def __init__(
        self,
        model: Any,
        sampler: RowSampler,
        shifts: Mapping[int, int],
        *,
        rows: int,
        prompts: int,
        chunk: int,
    ) -> None:
        size = ChunkSize(chunk)
        super().__init__(
            _Observed(model, sampler, shifts),
            sampler=sampler,
            completion_batch_size=rows,
            prefill_batch_size=prompts,
            prefill_step_size=size.tokens,
        )
        self._prompt_batch = _Prefilling.empty(self.model, sampler, prefill_step_size=chunk)
        self._generation_batch = _Decoding.empty(self.model, sampler)
        self._size = size
        self._prefill_seen = (0, 0.0)
        self._lone: Lone | None = None
        self._told: set[int] = set()
        self._eager = mx.default_device().type == mx.DeviceType.cpu

    @property
    def speed(self) -> float:
        """See `ChunkSize`."""
        return self._size.speed

    def add(self, segments: Sequence[Sequence[int]], state: list[Any] | None, before: Sequence[int]) -> int:
        """Take a row in, whose tokens `before` are in `state`; `next` stops at the end of each segment."""
        (uid,) = self.insert_segments(
            [[list(segment) for segment in segments]],
            max_tokens=[ENDLESS],
            caches=[roomy(state)],
            all_tokens=[list(before)],
        )
        return int(uid)

    def hasten(self, rows: int) -> None:
        """Have the rows that were added last be the next to begin."""
        self._unprocessed_sequences.rotate(rows)

    def cut(self, uid: int, count: int) -> None:
        """Have `next` stop, too, when so many tokens of a row have been prefilled here."""
        waiting = ((row[0], row[1], 0) for row in self._unprocessed_sequences)
        begun = zip(self._prompt_batch.uids, self._currently_processing, strict=True)
        for found, segments, done in [*waiting, *((other, row[0], row[1]) for other, row in begun)]:
            if found != uid:
                continue
            left = count - done
            for place, segment in enumerate(segments):
                if 0 < left < len(segment):
                    segments[place : place + 1] = [segment[:left], segment[left:]]
                left -= len(segment)
                if left <= 0:
                    return

    def next(self) -> tuple[list[Any], list[Any]]:
        """One decode step and at most one prefill chunk."""
        with mx.stream(self._stream):
            told, self._told = self._told, set()
            self._settle()
            lone = self._lone
            tokens = [] if lone is None else [_read(lone)]
            if lone is not None and lone.uid in told:
                tokens = [] if lone.uid in self.sampler.faults else [_read(lone)]
            prompts: list[Any] = []
            if lone is None or self._prompt_batch.uids or self._unprocessed_sequences:
                prompts, more = self._next()
                self._adapt_chunk()
                tokens += [response for response in more if response.uid not in told]
                tokens += self._read_first() if self._eager else []
            return prompts, tokens

    def _read_first(self) -> list[GenerationBatch.Response]:
        """First tokens, without the next ones begun: on a CPU those would take a whole pass before these are read.

        They are read again in the next step, and not told twice.
        """
        decoding = self._generation_batch
        new = [place for place, count in enumerate(decoding._num_tokens) if count == 0]
        new = [place for place in new if decoding.uids[place] not in self.sampler.faults]
        if not new:
            return []
        self._told = {decoding.uids[place] for place in new}
        tokens, scores = decoding._next_tokens.tolist(), decoding._next_logprobs
        return [
            GenerationBatch.Response(decoding.uids[place], tokens[place], scores[place], None, None, None)
            for place in new
        ]

    def _settle(self) -> None:
        """Let a row out of the batch that is alone here; or in again, now that others decode.

        While those are prefilled it stays out, and waits for their chunks only.
        """
        decoding = self._generation_batch
        if self._lone is not None:
            if decoding.uids:
                lone, self._lone = self._lone, None
                decoding.extend(_Joining(self, lone))
        elif len(decoding.uids) == 1 and not self._prompt_batch.uids and not self._unprocessed_sequences:
            (uid,) = decoding.uids
            drawn = decoding._next_tokens, decoding._next_logprobs[0]
            state = only(decoding.prompt_cache)
            lone = Lone(self.model, self.sampler, uid, state, decoding.tokens[0], drawn)
            super().remove([uid])
            self._lone = lone

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Caches of rows, the caller's own, and the tokens that are in them."""
        found = {uid: (state, list(tokens)) for uid, (state, tokens) in super().extract_cache(uids).items()}
        for uid in found.keys() & {row[0] for row in self._unprocessed_sequences}:
            state, tokens = found[uid]
            if tokens:  # mlx-lm hands out the very state that the row is going to begin with
                found[uid] = extracted(state), tokens
        if self._lone is not None and self._lone.uid in uids:
            found[self._lone.uid] = self._lone.extract(), list(self._lone.tokens)
        return found

    def remove(self, uids: Sequence[int], return_prompt_caches: bool = False) -> dict[int, Any]:
        """Drop rows."""
        gone: dict[int, Any] = super().remove(uids, return_prompt_caches)
        if self._lone is not None and self._lone.uid in uids:
            self._lone = None
        return gone

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes that the rows' caches hold."""
        return int(super().prompt_cache_nbytes) + (self._lone.nbytes if self._lone else 0)

    def close(self) -> None:
        """Let go of the rows."""
        self._lone = None
        super().close()

    def _adapt_chunk(self) -> None:
        """Size the next prefill chunk from the speed of the last one."""
        counters, seen = self._counters, self._prefill_seen
        self._prefill_seen = (counters.prompt_tokens, counters.prompt_time)
        tokens, seconds = counters.prompt_tokens - seen[0], counters.prompt_time - seen[1]
        if tokens and self.adapts:
            self._size.took(tokens, seconds, max(1, len(self._prompt_batch)))
            self.prefill_step_size = self._size.tokens


def _read(lone: Lone) -> GenerationBatch.Response:
    token, logprobs = lone.step()
    return GenerationBatch.Response(lone.uid, token, logprobs, None, None, None)
