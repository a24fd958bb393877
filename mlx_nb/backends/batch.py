"""Text models in one continuous batch: requests in, tokens out, and what is kept of their states.

Knows what a row stands for; how rows share the model's calls is the generator's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..config import EngineConfig
from ..errors import ModelLoadError
from ..request import Request
from ..sampling import SamplingParams
from .base import Event, Fault, ModelInfo, Prefilled, Token
from .chunks import FIRST, ChunkSize
from .generator import Generator
from .logprobs import logprob_of
from .prefix_cache import shortened
from .resident import Resident
from .samplers import RowSampler
from .shared import Prompt, Shared
from .vision import Looking
from .vision_inputs import MediaReader

__all__ = ["BatchBackend"]

log = logging.getLogger("mlx_nb")

PREFILL_ALONE = {"nemotron_h"}
"""Model types whose rows end with a wrong state when mlx-lm prefills them padded: its state-space layers are not
told the rows' lengths. A test tells when that is mended."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt in the batch.

    `cached` of its tokens were prefilled for another one, `before` were done when it joined.
    """

    prompt: Prompt
    cached: int
    before: int

    @property
    def request(self) -> Request:
        return self.prompt.request


class BatchBackend(Resident):
    """See `base.Backend`.

    Parameters
    ----------
    model, tokenizer
        As mlx-lm loads them, every array evaluated on the thread that made it (`loader.evaluate`).
    info : ModelInfo, optional
        What the loader found out.
    reader : MediaReader, optional
        Of a model that sees, which is then a `Sighted`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        info: ModelInfo | None = None,
        reader: MediaReader | None = None,
    ) -> None:
        scheduler = config.scheduler_config
        if scheduler.max_kv_size:
            raise ModelLoadError(
                "max_kv_size is not supported in a batch: a bounded cache gives other text there. Leave it at 0"
            )
        unfit = sorted({type(c).__name__ for c in make_prompt_cache(model) if not hasattr(c, "merge")})
        if unfit:
            raise ModelLoadError(
                f"this model's cache ({', '.join(unfit)}) can't be batched by mlx-lm: choose another model"
            )
        super().__init__(model, tokenizer, config, info, reader)
        self._sampler = RowSampler()
        self._rows: dict[int, _Row] = {}
        self._uids: dict[str, int] = {}
        self._shifts: dict[int, int] = {}
        self._looking: deque[Looking] = deque()
        self._look_size = ChunkSize(scheduler.prefill_step_size)
        self._shared = Shared(len(self._blank()), trimmable=self._trimmable)
        self._generator = self._make_generator(self._sampler)

    def _make_generator(self, sampler: RowSampler) -> Generator:
        scheduler = self._config.scheduler_config
        kind = getattr(self._model, "model_type", None)
        alone = kind in PREFILL_ALONE or getattr(self._model, "prefills_alone", False)
        return Generator(
            self._model,
            sampler,
            self._shifts,
            rows=scheduler.max_running,
            prompts=1 if alone else min(scheduler.prefill_batch_size, scheduler.max_running),
            chunk=scheduler.prefill_step_size,
        )

    # -- requests ---------------------------------------------------------------------------------------

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """Take a request in, on top of the longest prefix that is stored, or that another one will have."""
        request = self._whole(request)
        if request.media is None:
            self._enter(self._prompt(request, made))
            return
        tokens = [*request.prompt_token_ids, *made]
        state, covered = self._prefix.fetch(request.key(tokens)) if self._prefix else (None, 0)
        if covered < request.media.last:
            self._looking.append(self._look_at(request, made, state, covered))
        else:
            prompt = self._prompt(request, made)
            with self._or_forget(prompt):
                self._join(prompt, state, covered, covered)

    def _prompt(self, request: Request, made: Sequence[int]) -> Prompt:
        key = request.key([*request.prompt_token_ids, *made])
        return self._shared.add(request, made, key, self._boundaries(request, len(key) - 1))

    def _enter(self, prompt: Prompt) -> bool:
        """Let a prompt join the batch, unless it had better wait for what another one will have."""
        state, covered = None, 0
        with self._or_forget(prompt):
            if self._prefix is not None:
                covered = self._prefix.covers(prompt.key)
                if self.footprint.bytes([len(prompt.key)]) <= self._prefix.stats.max_bytes:
                    source = self._shared.source(prompt, covered)
                    if self._shared.wait(prompt, covered if source is None else source[1]):
                        self._cut(prompt)
                        return False
                    if source is not None:
                        self._share(*source)
                state, covered = self._prefix.fetch(prompt.key)
            self._join(prompt, state, covered, covered)
        return True

    @contextlib.contextmanager
    def _or_forget(self, prompt: Prompt) -> Iterator[None]:
        """A prompt that fails to join must not be waited for."""
        try:
            yield
        except BaseException:
            self._shared.remove(prompt.request.request_id)
            raise

    def _enter_ready(self) -> list[Event]:
        """Let those in that need wait no longer."""
        events: list[Event] = []
        entered = 0
        for prompt in self._shared.ready():
            try:
                entered += self._enter(prompt)
            except Exception as error:
                events.append(Fault(prompt.request.request_id, error))
        self._generator.hasten(entered)  # they have waited already
        return events

    def _cut(self, prompt: Prompt) -> None:
        """Have what a prompt waits for stop there, if need be."""
        lead, place = prompt.lead, prompt.place
        if lead is not None and self._shared.cut(prompt) and lead.joined:
            uid = self._uids[lead.request.request_id]
            self._generator.cut(uid, place - self._rows[uid].before)

    def _share(self, prompt: Prompt, place: int) -> None:
        """Store the state of a row's first tokens; what goes wrong here costs others time only."""
        assert self._prefix is not None
        try:
            ((state, tokens),) = self._states([self._uids[prompt.request.request_id]]).values()
            self._prefix.store(prompt.key[:place], shortened(state, len(tokens) - place))
        except Exception:
            log.exception("mlx_nb: could not share a prefix")

    def _join(self, prompt: Prompt, state: list[Any] | None, before: int, cached: int) -> None:
        """Let a row into the batch whose first `before` tokens are in `state`."""
        request, made = prompt.request, prompt.made
        tokens = [*request.prompt_token_ids, *made]
        constraint = self._constraint(request, made)
        cuts = sorted({before, *(cut for cut in prompt.cuts if cut > before), len(tokens)})
        segments = [tokens[a:b] for a, b in itertools.pairwise(cuts)]
        uid = self._generator.add(segments, state, tokens[:before])
        self._sampler.add(uid, request, constraint, made)
        self._rows[uid] = _Row(prompt, cached, before)
        self._uids[request.request_id] = uid
        prompt.joined, prompt.done = True, before
        if request.media is not None and (shift := self._model.shift(request.media)):
            self._shifts[uid] = shift

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """Drop rows; with `keep`, their states become prefixes."""
        gone = set(request_ids)
        self._looking = deque(look for look in self._looking if look.request.request_id not in gone)
        uids = [self._uids[i] for i in request_ids if i in self._uids]
        self._checkpoint(
            [uid for uid in uids if keep or self._shared.leads(self._rows[uid].request.request_id)]
        )
        for request_id in request_ids:
            self._shared.remove(request_id)
        if not uids:
            return
        self._generator.remove(uids)
        for uid in uids:
            self._forget(uid)
        if not self._rows:
            mx.clear_cache()

    def _forget(self, uid: int) -> None:
        row = self._rows.pop(uid, None)
        if row is not None:
            del self._uids[row.request.request_id]
            self._shared.remove(row.request.request_id)
        self._sampler.discard(uid)
        self._shifts.pop(uid, None)

    def next(self) -> list[Event]:
        """One decode step and at most one prefill chunk."""
        events = self._enter_ready()
        prompts, tokens = self._generator.next()
        self._shared.pace(self._generator.speed)
        for response in prompts:
            row = self._rows[response.uid]
            done, total = (row.before + count for count in response.progress)
            events.append(Prefilled(row.request.request_id, done, total, row.cached))
            row.prompt.done = done
            if response.end_of_segment and done in row.prompt.cuts:
                self._checkpoint([response.uid])
        # A row at fault in sampling its next token has this one still, which may well be its last.
        for response in tokens:
            request = self._rows[response.uid].request
            asked = request.params.logprobs
            logprob = None if asked is None else logprob_of(response.token, response.logprobs, asked)
            events.append(Token(request.request_id, response.token, logprob))
        return events + self._drop_faulty() + self._look()

    def _look(self) -> list[Event]:
        """Go on with the pictures of one prompt; it joins the batch when they are done."""
        if not self._looking:
            return []
        look = self._looking[0]
        request = look.request
        try:
            if look.step(self._model, self._look_size, self._prefix):
                self._looking.popleft()
                prompt = self._prompt(request, look.made)
                with self._or_forget(prompt):
                    self._join(prompt, look.state, look.done, look.cached)
                self._generator.hasten(1)  # it has waited already
        except Exception as error:
            if self._looking and self._looking[0] is look:
                self._looking.popleft()
            return [Fault(request.request_id, error)]
        return [look.progress()]

    def _checkpoint(self, uids: list[int]) -> None:
        """Store the states of some rows; what goes wrong here costs a later prompt time, and nobody an answer."""
        if self._prefix is None or not uids:
            return
        try:
            for uid, (state, tokens) in self._states(uids).items():
                self._prefix.store(self._rows[uid].request.key(tokens), state)
        except Exception:
            log.exception("mlx_nb: could not store a prefix")

    def _states(self, uids: list[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Caches of rows, the caller's own, and the tokens that are in them."""
        return self._generator.extract_cache(uids)

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
        spared = [row.request.request_id for uid, row in self._rows.items() if at_work and uid not in at_work]
        with contextlib.suppress(Exception):  # it is broken anyway
            self._generator.close()
        spared += [*(look.request.request_id for look in self._looking), *self._shared.clear()]
        self._rows.clear()
        self._uids.clear()
        self._shifts.clear()
        self._looking.clear()
        self._sampler = RowSampler()
        self._generator = self._make_generator(self._sampler)
        mx.clear_cache()
        return spared

    def warm_up(self) -> None:
        """Run a few tokens through a batch of its own: a row alone, then several that it joins."""
        sampler = RowSampler()
        generator = self._make_generator(sampler)
        rows = min(4, self._config.scheduler_config.max_running)
        for more in (1, rows - 1):
            for _ in range(more):
                uid = generator.add([[0] * FIRST], None, [])
                sampler.add(uid, Request(f"warm-{uid}", [0], SamplingParams(), seed=0, arrival=0.0))
            made = 0
            while made < 4 * more:
                made += len(generator.next()[1])
        generator.close()
        mx.clear_cache()

    def _kv_bytes(self) -> int:
        looking = sum(look.nbytes() for look in self._looking)
        return looking + (self._generator.prompt_cache_nbytes if self._rows else 0)

    def close(self) -> None:
        """Let go of the model."""
        self._generator.close()
        self._looking.clear()
        del self._generator, self._sampler
        super().close()
