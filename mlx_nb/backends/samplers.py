"""The next token of every row of a batch, in one go.

mlx-lm samples row by row as soon as two rows hold different samplers. Here all rows share one sampler, which is
told which rows it gets and keeps each row's parameters, history and seed.

The draw is Gumbel-max: the noise of a candidate depends on the request's seed, its position and the token id
alone, so a seeded request gives the same text in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..request import Request
from ..sampling import SamplingParams
from .grammar import Constraint

__all__ = ["RowSampler"]

CANDIDATES = 1024
"""Tokens that top_p and min_p look at first; a row that needs more gets a full sort."""


@dataclass(slots=True)
class _Row:
    """One request's parameters and what its edits need to remember."""

    params: SamplingParams
    seed: int
    prompt: list[int]
    constraint: Constraint | None = None
    position: int = 0
    output: list[int] = field(default_factory=list)
    last: mx.array | None = None
    counts: mx.array | None = None
    seen: mx.array | None = None
    recent: mx.array | None = None

    @property
    def penalised(self) -> bool:
        p = self.params
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1

    @property
    def edited(self) -> bool:
        return bool(self.penalised or self.params.logit_bias or self.guided)

    @property
    def guided(self) -> bool:
        """Whether its next token depends on code that needs the last one's value."""
        return bool(self.params.logits_processors or self.constraint)


class RowSampler:
    """Shared by all rows; `expect` names the rows of the next call.

    Attributes
    ----------
    faults : dict of int to BaseException
        Rows whose logits processor or grammar raised; they get some token and must be dropped.
    at_work : list of int
        Rows of the model call that began last.
    """

    def __init__(self) -> None:
        self.faults: dict[int, BaseException] = {}
        self._rows: dict[int, _Row] = {}
        self.at_work: list[int] = []
        self._expected: Sequence[int] | None = None
        self._logits: mx.array | None = None

    def add(
        self, uid: int, request: Request, constraint: Constraint | None = None, made: Sequence[int] = ()
    ) -> None:
        """Take a row in, `made` being the tokens of its answer so far, which `constraint` has seen."""
        self._rows[uid] = _Row(
            request.params, request.seed, request.prompt_token_ids, constraint, len(made), list(made)
        )

    def discard(self, uid: int) -> None:
        """Forget a row."""
        self._rows.pop(uid, None)
        self.faults.pop(uid, None)

    def is_plain(self, uid: int) -> bool:
        """Whether the row's next token is the likeliest one, whatever came before."""
        row = self._rows[uid]
        return row.params.greedy and not row.edited

    def expect(self, uids: Sequence[int]) -> None:
        """The next call is for these rows, in this order."""
        self._expected = uids
        self.at_work = list(uids)

    def observe(self, logits: mx.array) -> None:
        """See the model's output, shape (rows, length, vocabulary), if it is about to be sampled from."""
        if self._expected is not None:
            self._logits = logits[:, -1, :]

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Tokens, shape (rows,), for log-probabilities of shape (rows, vocabulary)."""
        assert self._expected is not None, "expect() goes before each call"
        uids, self._expected = self._expected, None
        logits, self._logits = self._logits, None
        rows = [self._rows[uid] for uid in uids]
        scores = logprobs
        if any(row.edited for row in rows):
            # Penalties scale the raw logits; a row's log-probabilities differ from them by a constant.
            raw = logprobs if logits is None else logits.astype(mx.float32)
            scores = mx.concatenate(
                [
                    # In half precision the two differ by rounding: an unedited row must not notice its company.
                    self._edit(uid, row, raw[i : i + 1]) if row.edited else logprobs[i : i + 1]
                    for i, (uid, row) in enumerate(zip(uids, rows, strict=True))
                ]
            )
        tokens = mx.argmax(scores, axis=-1)
        hot = [i for i, row in enumerate(rows) if not row.params.greedy]
        if hot:
            tokens = tokens.astype(mx.uint32)
            tokens[mx.array(hot)] = _draw(scores[mx.array(hot)], [rows[i] for i in hot])
        for i, row in enumerate(rows):
            row.position += 1
            if row.edited:
                row.last = tokens[i : i + 1]
        return tokens

    def _edit(self, uid: int, row: _Row, logits: mx.array) -> mx.array:
        if row.params.logit_bias:
            ids = mx.array(list(row.params.logit_bias))
            logits = logits.at[:, ids].add(mx.array(list(row.params.logit_bias.values())))
        if row.penalised:
            logits = _penalise(row, logits)
        if row.guided:
            try:
                logits = _guide(row, logits)
            except Exception as error:
                self.faults[uid] = error
            except BaseException as error:
                # SystemExit, say: it must end neither the engine nor the consumer's loop.
                self.faults[uid] = RuntimeError(f"a logits processor raised {error!r}")
        return logits


def _guide(row: _Row, logits: mx.array) -> mx.array:
    """Logits after the row's own processors and its grammar."""
    if row.last is not None:
        latest: Any = row.last.tolist()
        row.output += latest
        if row.constraint is not None:
            row.constraint.advance(latest[0])
    edited = logits
    for processor in row.params.logits_processors or ():
        edited = processor(mx.array(row.prompt + row.output), edited)
    if row.constraint is not None:
        edited = row.constraint.mask(edited)
    if edited.shape != logits.shape:
        raise ValueError(f"a logits processor returned shape {edited.shape} for {logits.shape}")
    mx.eval(edited)  # a lazy fault would surface in the middle of the whole batch's step
    return edited


def _penalise(row: _Row, logits: mx.array) -> mx.array:
    """Penalise repetition, then presence and frequency.

    Repetition as in Keskar et al. 2019 (arXiv:1909.05858), dividing what is above zero and multiplying what is
    below; the others are subtracted, as OpenAI defines them.
    """
    params, size = row.params, logits.shape[-1]
    if params.repetition_penalty != 1:
        seen = _seen(row, size)
        scaled = mx.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = mx.where(seen, scaled, logits)
    if params.presence_penalty or params.frequency_penalty:
        if row.counts is None:
            row.counts = mx.zeros((size,))
            if row.output:
                row.counts = row.counts.at[mx.array(row.output)].add(1)
        elif row.last is not None:
            row.counts = row.counts.at[row.last].add(1)
        logits = logits - params.presence_penalty * (row.counts > 0) - params.frequency_penalty * row.counts
    return logits


def _seen(row: _Row, size: int) -> mx.array:
    """Which tokens of the vocabulary the repetition penalty applies to."""
    window = row.params.repetition_window
    if window is None:
        if row.seen is None:
            row.seen = _mask(mx.array(row.prompt + row.output), size)
        elif row.last is not None:
            row.seen = mx.maximum(row.seen, _mask(row.last, size))
        return row.seen
    if row.recent is None:
        row.recent = mx.array((row.prompt + row.output)[-window:], dtype=mx.uint32)
    elif row.last is not None:
        row.recent = mx.concatenate([row.recent, row.last.astype(mx.uint32)])[-window:]
    return _mask(row.recent, size)


def _mask(ids: mx.array, size: int) -> mx.array:
    mask = mx.zeros((size,), dtype=mx.bool_)
    mask[ids] = True
    return mask


def _draw(scores: mx.array, rows: Sequence[_Row]) -> mx.array:
    """Temperature, then top_k, top_p, min_p, then one draw a row."""
    scaled = scores.astype(mx.float32) / mx.array([[row.params.temperature] for row in rows])
    bounded = [i for i, r in enumerate(rows) if r.params.top_k or r.params.top_p < 1 or r.params.min_p]
    free = [i for i in range(len(rows)) if i not in set(bounded)]
    tokens = mx.zeros((len(rows),), dtype=mx.uint32)
    if free:
        some = [rows[i] for i in free]
        noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(
            mx.array([[_mix(row), row.position] for row in some], dtype=mx.uint32)
        )
        tokens[mx.array(free)] = mx.argmax(scaled[mx.array(free)] + noise, axis=-1)
    if bounded:
        tokens[mx.array(bounded)] = _draw_bounded(scaled[mx.array(bounded)], [rows[i] for i in bounded])
    return tokens


def _draw_bounded(scaled: mx.array, rows: Sequence[_Row], candidates: int = CANDIDATES) -> mx.array:
    size = scaled.shape[-1]
    count = min(size, max([candidates, *(min(row.params.top_k, size) for row in rows)]))
    if count < size:
        ids = mx.argpartition(scaled, -count, axis=-1)[:, -count:]
        values = mx.take_along_axis(scaled, ids, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids, values = (mx.take_along_axis(a, order, axis=-1) for a in (ids, values))
    else:
        ids = mx.argsort(-scaled, axis=-1)
        values = mx.take_along_axis(scaled, ids, axis=-1)

    top_k = mx.array([[row.params.top_k or size] for row in rows])
    top_p = mx.array([[row.params.top_p] for row in rows])
    min_p = mx.array([[row.params.min_p] for row in rows])
    kept = mx.arange(count)[None] < top_k
    # The mass that top_p is a share of: all tokens, or those that top_k left.
    inside = mx.logsumexp(mx.where(kept, values, -mx.inf), axis=-1, keepdims=True)
    whole = mx.where(top_k < size, inside, mx.logsumexp(scaled, axis=-1, keepdims=True))
    probabilities = mx.exp(values - whole)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    kept = kept & ((before < top_p) | (top_p >= 1)) & (values >= values[:, :1] + mx.log(min_p))
    if count < size:
        cut_short = kept[:, -1] & (top_k[:, 0] > count)
        if any(not row.params.top_k for row in rows) and mx.any(cut_short).item():
            return _draw_bounded(scaled, rows, size)

    places = mx.array([[_mix(row)] for row in rows], dtype=mx.uint32)
    keys = mx.stack([mx.broadcast_to(places, ids.shape), ids.astype(mx.uint32)], axis=-1)
    noise = mx.vmap(mx.vmap(lambda key: mx.random.gumbel((), key=key)))(keys)
    best = mx.argmax(mx.where(kept, values + noise, -mx.inf), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[:, 0].astype(mx.uint32)


def _mix(row: _Row) -> int:
    """32 bits from seed and position (the finaliser of SplitMix64, Steele et al. 2014)."""
    z = (row.seed + 0x9E3779B97F4A7C15 * (row.position + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0xFFFFFFFF
