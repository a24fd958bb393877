"""One request at a time, at the highest speed a single stream can have.

Decoding runs one step ahead: while a token is read, the next one is being computed. With a draft it goes on by
several tokens a step. Where an answer ends is decided above, as for every backend.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..config import EngineConfig, SparsePrefill
from ..errors import ModelLoadError, RequestError
from ..request import Request
from ..sampling import SamplingParams
from .base import CacheStats, Drafted, Event, Fault, ModelInfo, Prefilled, Token
from .bounded import bounded_cache
from .chunks import ChunkSize
from .drafts import Draft, Watcher
from .draws import decisive
from .logprobs import logprob_of
from .lone import Ahead, draw
from .resident import Resident
from .rollback import Trial, trial_objection
from .samplers import RowSampler
from .specprefill import Run, Scoring, SparseCache, choose, require_scorer, require_sparse, sparse
from .vision import Looking
from .vision_inputs import MediaReader

__all__ = ["SingleBackend"]

log = logging.getLogger("mlx_nb")

ROW = 0
"""The one row, to the sampler."""

SLOTS = 16
"""Snapshots that are kept of prompts that others began with."""


@dataclass(slots=True)
class _Speculated:
    """Tokens guessed, and rightly."""

    rounds: int = 0
    drafts: int = 0
    accepted: int = 0

    def took(self, drafts: int, accepted: int) -> None:
        self.rounds += 1
        self.drafts += drafts
        self.accepted += accepted


@dataclass(slots=True)
class _Sparse:
    """Prompts prefilled in part, with their tokens and those that were kept; and those that could not be."""

    requests: int = 0
    tokens: int = 0
    kept: int = 0
    fallbacks: int = 0
    last_error: str | None = None


@dataclass(slots=True)
class _Counts:
    target_calls: int = 0
    speculation: _Speculated = field(default_factory=_Speculated)
    sparse: _Sparse = field(default_factory=_Sparse)


@dataclass(slots=True)
class _Stream:
    """The request at work.

    `fed` is the position that the caches have come to; `ahead` is the token after the last of `tokens`, which may
    still be in the making. Of a sparse prefill, `runs` are the parts of the prompt that are still to be fed. Pictures
    are taken in before anything else, by `looking`; the positions after them are `shifted`. For a draft that goes by
    them, `shown` are the hidden states of the last call.
    """

    request: Request
    tokens: list[int]
    state: list[Any]
    fed: int
    cached: int
    boundaries: list[int]
    looking: Looking | None = None
    shifted: int = 0
    scoring: Scoring | None = None
    share: SparsePrefill | None = None
    runs: list[Run] | None = None
    ahead: Ahead | None = None
    shown: mx.array | None = None
    prefilled: int = field(init=False)

    def __post_init__(self) -> None:
        self.prefilled = len(self.tokens)

    def so_far(self) -> list[int]:
        """What the state that covers what is fed is kept under."""
        return self.request.key(self.tokens[: self.fed])


class SingleBackend(Resident):
    """See `base.Backend`. At most one request is inserted at a time: the engine's scheduler sees to that.

    Parameters
    ----------
    model, tokenizer
        As mlx-lm loads them, every array evaluated on the thread that made it (`loader.evaluate`).
    info : ModelInfo, optional
        What the loader found out.
    reader : MediaReader, optional
        Of a model that sees, which is then a `Sighted`.
    draft : Draft, optional
        Guesses for speculative decoding.
    draft_tokens : int
        Tokens guessed a step.
    scorer : optional
        The draft model of sparse prefill, as mlx-lm loads it.
    sparse_prefill : SparsePrefill, optional
        For requests that say nothing of their own.
    """

    max_prefixes = SLOTS

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        info: ModelInfo | None = None,
        reader: MediaReader | None = None,
        *,
        draft: Draft | None = None,
        draft_tokens: int = 4,
        scorer: Any = None,
        sparse_prefill: SparsePrefill | None = None,
    ) -> None:
        if scorer is not None:
            require_scorer(scorer)
            require_sparse(model)
            self.prefills_sparsely = True
        super().__init__(model, tokenizer, config, info, reader)
        if size := config.scheduler_config.max_kv_size:
            one_pass = getattr(model, "attends_both_ways", False)
            self.check = functools.partial(_check_bound, self.check, size, one_pass)
        if draft is not None and (objection := trial_objection(self._blank())):
            raise ModelLoadError(f"speculation needs a model that can take tokens back: {objection}")
        self._draft, self._draft_tokens = draft, draft_tokens
        self._watcher = draft if isinstance(draft, Watcher) else None
        self._scorer, self._sparse_prefill = scorer, sparse_prefill
        self._sampler = RowSampler()
        self._chunk = ChunkSize(config.scheduler_config.prefill_step_size)
        self._stream: _Stream | None = None
        self._counts = _Counts()

    def _blank(self) -> list[Any]:
        """Caches of a new request."""
        size = self._config.scheduler_config.max_kv_size
        return bounded_cache(self._model, size) if size else make_prompt_cache(self._model)

    # -- requests ---------------------------------------------------------------------------------------

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """Take the request in, on top of the longest prefix that is stored."""
        assert self._stream is None, "one request at a time"
        request = self._whole(request)
        tokens = [*request.prompt_token_ids, *made]
        constraint = self._constraint(request, made)
        state, covered = self._prefix.fetch(request.key(tokens)) if self._prefix else (None, 0)
        self._sampler.add(ROW, request, constraint, made)
        boundaries = sorted(b for b in self._boundaries(request, len(tokens) - 1) if b > covered)
        stream = _Stream(request, tokens, state or self._blank(), covered, covered, boundaries)
        self._stream = stream
        if request.media is not None:
            stream.shifted = self._model.shift(request.media)
            if covered < request.media.last:
                stream.looking = self._look_at(request, made, stream.state, covered)
        wanted = request.sparse_prefill or self._sparse_prefill
        if wanted is not None and len(tokens) - covered >= max(2, wanted.threshold):
            if request.media is None:
                stream.scoring, stream.share = Scoring(self._scorer, tokens), wanted
            else:
                self._fall_back("prompts with images and videos are read whole")

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """Drop the request; with `keep`, its state becomes a prefix."""
        stream = self._stream
        if stream is None or stream.request.request_id not in request_ids:
            return
        if keep and self._prefix is not None and stream.runs is None:
            self._prefix.store(stream.so_far(), stream.state)
        self._sampler.discard(ROW)
        self._let_go()

    def reset(self) -> list[str]:
        """Begin again with nothing; the request that was at work had a part in it."""
        self._sampler = RowSampler()
        self._let_go()
        return []

    def _let_go(self) -> None:
        self._stream = None
        if self._draft is not None:
            self._draft.begin()
        mx.clear_cache()

    def next(self) -> list[Event]:
        """One prefill chunk, or one step."""
        stream = self._stream
        if stream is None:
            return []
        if stream.looking is not None:
            return self._look(stream, stream.looking)
        if stream.scoring is not None:
            return self._score(stream, stream.scoring)
        if self._draft_reads(stream):
            return []
        if len(stream.tokens) - stream.fed > 1 and stream.ahead is None:
            return self._prefill(stream)
        events = self._plain(stream) if self._draft is None else self._speculate(stream, self._draft)
        if faults := dict(self._sampler.faults):
            self.remove([stream.request.request_id], keep=False)
            events += [Fault(stream.request.request_id, error) for error in faults.values()]
        return events

    def warm_up(self) -> None:
        """Run a few tokens, as a request would."""
        self.insert(Request("warm", [0] * self._chunk.tokens, SamplingParams(temperature=0), 0, 0.0))
        try:
            for _ in range(4):
                self.next()
        finally:
            self.reset()

    # -- steps ------------------------------------------------------------------------------------------

    def _look(self, stream: _Stream, looking: Looking) -> list[Event]:
        """Go on with the pictures."""
        done = looking.step(self._model, self._chunk, self._prefix)
        stream.state, stream.fed, stream.cached = looking.state, looking.done, looking.cached
        if done:
            stream.looking = None
            stream.boundaries = [b for b in stream.boundaries if b > stream.fed]
        return [looking.progress()]

    def _score(self, stream: _Stream, scoring: Scoring) -> list[Event]:
        """Have the draft model read on, and in the end choose what the target reads."""
        share, counts = stream.share, self._counts.sparse
        assert share is not None
        try:
            if scoring.feed(self._chunk.tokens):
                return []
            scores = scoring.scores()[stream.fed :]
            runs = choose(scores, share.keep_pct, share.backbone_pct)
        except Exception as error:
            stream.scoring = None
            self._fall_back(f"{type(error).__name__}: {error}")
            return []
        stream.scoring, stream.boundaries = None, []
        stream.runs = [(begin + stream.fed, end + stream.fed) for begin, end in runs]
        counts.requests += 1
        counts.tokens += len(scores)
        counts.kept += sum(end - begin for begin, end in runs)
        stream.state = sparse(stream.state)
        self._move_to(stream, stream.runs[0][0])
        return []

    def _fall_back(self, reason: str) -> None:
        counts = self._counts.sparse
        counts.fallbacks += 1
        counts.last_error = reason
        log.warning("mlx_nb: no SpecPrefill (%s); the whole prompt is prefilled", reason)

    def _move_to(self, stream: _Stream, position: int) -> None:
        """Go on at a later position, leaving out what is between."""
        stream.fed = position
        for cache in stream.state:
            if isinstance(cache, SparseCache):
                cache.offset = position

    def _prefill(self, stream: _Stream) -> list[Event]:
        last = len(stream.tokens) - 1
        run_end = stream.runs[0][1] if stream.runs else last
        end = min([stream.fed + self._chunk.tokens, run_end, *stream.boundaries[:1]])
        chunk = stream.tokens[stream.fed : end]
        began = time.perf_counter()
        self._feed(stream, chunk)
        mx.eval([c.state for c in stream.state], stream.shown)
        self._show(stream, chunk)
        mx.clear_cache()
        self._chunk.took(len(chunk), time.perf_counter() - began)
        if stream.boundaries and stream.fed == stream.boundaries[0]:
            stream.boundaries.pop(0)
            if self._prefix is not None:
                self._prefix.store(stream.so_far(), copy.deepcopy(stream.state))
        if stream.runs and stream.fed == stream.runs[0][1]:
            stream.runs.pop(0)
            self._move_to(stream, stream.runs[0][0] if stream.runs else last)
        request = stream.request
        return [Prefilled(request.request_id, stream.fed, stream.prefilled, stream.cached)]

    def _draft_reads(self, stream: _Stream) -> bool:
        """Have the draft take in a chunk of what the target has of the prompt; whether there was one."""
        if self._draft is None or stream.fed >= stream.prefilled:
            return False
        return self._draft.read(stream.tokens[: stream.fed], self._chunk.tokens)

    def _plain(self, stream: _Stream) -> list[Event]:
        """The next token, with the one after it begun."""
        events: list[Event] = []
        if stream.ahead is None:
            stream.ahead = Ahead(functools.partial(self._call, stream), self._sampler, ROW)
            stream.ahead.begin(mx.array(stream.tokens[-1:]))
            events.append(
                Prefilled(stream.request.request_id, stream.prefilled, stream.prefilled, stream.cached)
            )
        return [*events, self._said(stream, *stream.ahead.step())]

    def _speculate(self, stream: _Stream, draft: Draft) -> list[Event]:
        """As many tokens as the target agrees with, and the one that it says then."""
        request = stream.request
        events: list[Event] = []
        if stream.fed < stream.prefilled:
            events.append(Prefilled(request.request_id, stream.prefilled, stream.prefilled, stream.cached))
        count = self._worth_guessing(stream)
        guesses = draft.propose(stream.tokens, count) if count > 0 else []
        trial = Trial(stream.state, 1 + len(guesses)) if guesses else None
        last = stream.tokens[-1:]
        logits = self._call(stream, mx.array([*last, *guesses]))
        said = self._agreed(stream, logits, guesses)
        kept = len(said)
        stream.fed -= 1 + len(guesses) - kept
        known = [*last, *guesses]
        if trial is not None:
            trial.keep(kept, lambda count: self._again(stream, known[:count]))
        self._show(stream, known[:kept])
        if guesses:
            self._counts.speculation.took(len(guesses), kept - 1)
            events.append(Drafted(request.request_id, len(guesses), kept - 1))
        return events + said

    def _worth_guessing(self, stream: _Stream) -> int:
        """How many guesses may be of use; none if it is not above 0."""
        request = stream.request
        answered = len(stream.tokens) - len(request.prompt_token_ids)
        count = min(self._draft_tokens, request.params.max_tokens - answered - 1)
        if size := self._config.scheduler_config.max_kv_size:
            # Of several tokens at once, those past the bound would lose sight of the first ones, which always stay.
            count = min(count, size - stream.fed - 1)
        return count

    def _agreed(self, stream: _Stream, logits: mx.array, guesses: Sequence[int]) -> list[Event]:
        """What the target says at each place, up to the first that was not guessed."""
        if self._sampler.is_plain(ROW) and stream.request.params.logprobs is None:
            best: Any = mx.argmax(decisive(logits), axis=-1)[0].tolist()
            kept = next((i for i, guess in enumerate(guesses) if guess != best[i]), len(guesses))
            return [self._said(stream, token) for token in best[: kept + 1]]
        said: list[Event] = []
        for i in range(len(guesses) + 1):
            token, logprobs = draw(self._sampler, ROW, logits[:, i : i + 1, :])
            value = int(token.item())  # type: ignore[arg-type]
            said.append(self._said(stream, value, logprobs))
            if self._sampler.faults or i == len(guesses) or value != guesses[i]:
                break
        return said

    def _again(self, stream: _Stream, tokens: Sequence[int]) -> None:
        self._run(stream, mx.array(list(tokens)))

    def _feed(self, stream: _Stream, tokens: Sequence[int]) -> None:
        self._call(stream, mx.array(list(tokens)))

    def _call(self, stream: _Stream, tokens: mx.array) -> mx.array:
        """Logits, shape (1, tokens, vocabulary)."""
        self._counts.target_calls += 1
        stream.fed += tokens.size
        return self._run(stream, tokens)

    def _run(self, stream: _Stream, tokens: mx.array) -> mx.array:
        more: dict[str, Any] = {"shifted": [stream.shifted]} if stream.shifted else {}
        logits: mx.array
        if self._watcher is None:
            logits = self._model(tokens[None], cache=stream.state, **more)
        else:
            logits, stream.shown = self._model.reveal(tokens[None], stream.state, self._watcher.wants, **more)
        return logits

    def _show(self, stream: _Stream, kept: Sequence[int]) -> None:
        """Let a draft that goes by it see what the last call computed of the tokens that were kept."""
        if self._watcher is not None and stream.shown is not None:
            self._watcher.see(kept, stream.shown[:, : len(kept)], stream.state)
            stream.shown = None

    def _said(self, stream: _Stream, token: int, logprobs: mx.array | None = None) -> Token:
        stream.tokens.append(token)
        request = stream.request
        asked = request.params.logprobs
        if asked is None or logprobs is None:
            return Token(request.request_id, token)
        return Token(request.request_id, token, logprob_of(token, logprobs, asked))

    def report(self) -> dict[str, dict[str, Any]]:
        """What speculation and sparse prefill did."""
        counts = self._counts
        return {
            "target": {"calls": counts.target_calls},
            "mtp": {"enabled": self._draft is not None, **asdict(counts.speculation)},
            "specprefill": {"enabled": self._scorer is not None, **asdict(counts.sparse)},
            "system_kv_cache": self._slots(),
        }

    def _slots(self) -> dict[str, Any]:
        prefix = self._prefix
        stats = CacheStats() if prefix is None else prefix.stats
        sizes = [] if prefix is None else prefix.sizes()
        slots = [{"tokens": tokens, "memory_mb": size / 2**20} for tokens, size in sizes]
        looked_up = stats.hits + stats.misses
        return {
            "capacity": 0 if prefix is None else SLOTS,
            "in_use": len(slots),
            "total_memory_mb": sum(slot["memory_mb"] for slot in slots),
            "slots": slots,
            "counters": {
                "hits": stats.hits,
                "misses": stats.misses,
                "hit_ratio": stats.hits / looked_up if looked_up else 0.0,
                "evictions": stats.evictions,
                "tokens_saved": stats.tokens_saved,
            },
        }

    def _kv_bytes(self) -> int:
        return sum(int(c.nbytes) for c in self._stream.state) if self._stream else 0

    def close(self) -> None:
        """Let go of the model."""
        self._stream = self._draft = self._watcher = self._scorer = None
        del self._sampler
        super().close()


def _check_bound(check: Callable[[Request], None], size: int, one_pass: bool, request: Request) -> None:
    """Refuse, besides what `check` does, what a cache of `size` tokens would forget before it is looked at."""
    check(request)
    tokens = len(request.prompt_token_ids)
    if (request.media is not None or one_pass) and tokens >= size:
        what = "this model reads a prompt" if request.media is None else "images and videos are read"
        raise RequestError(
            f"{what} in one piece, and with max_kv_size={size} a prompt of {tokens:,} tokens doesn't fit: raise it"
        )
