"""The next token of every row of a batch, in one go.

mlx-lm samples row by row as soon as two rows hold different samplers. Here all rows share one sampler, which is
told which rows it gets and keeps each row's parameters, history and seed. While these rows stay the same, so does
what was prepared for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..request import Request
from ..sampling import SamplingParams
from .draws import Draw, FewDraw, Wish, decisive, draw_for
from .edits import Edited, Edits
from .grammar import Constraint

__all__ = ["RowSampler"]


@dataclass(slots=True)
class _Row:
    """One request's parameters, and where its answer is.

    `output` and `last` are its tokens so far, kept for rows whose next one depends on code that needs their values.
    """

    params: SamplingParams
    seed: int
    prompt: list[int]
    edited: Edited
    constraint: Constraint | None
    position: int
    output: list[int]
    last: mx.array | None = None

    @property
    def guided(self) -> bool:
        return bool(self.params.logits_processors or self.constraint)

    @property
    def touched(self) -> bool:
        return self.edited.active or self.guided


class RowSampler:
    """Shared by all rows; `expect` names the rows of the next call.

    Attributes
    ----------
    faults : dict of int to BaseException
        Rows whose logits processor or grammar raised; they get some token and must be dropped.
    at_work : sequence of int
        Rows of the model call that began last.
    shows : bool
        Whether anyone asks for the log-probabilities of the rows that were sampled last.
    """

    def __init__(self) -> None:
        self.faults: dict[int, BaseException] = {}
        self.shows = False
        self._rows: dict[int, _Row] = {}
        self.at_work: Sequence[int] = []
        self._expected: Sequence[int] | None = None
        self._logits: mx.array | None = None
        self._batch: _Batch | None = None

    def add(
        self, uid: int, request: Request, constraint: Constraint | None = None, made: Sequence[int] = ()
    ) -> None:
        """Take a row in, `made` being the tokens of its answer so far, which `constraint` has seen."""
        params, prompt = request.params, request.prompt_token_ids
        self._rows[uid] = _Row(
            params, request.seed, prompt, Edited(params, prompt, made), constraint, len(made), list(made)
        )
        self._part()

    def discard(self, uid: int) -> None:
        """Forget a row."""
        self.faults.pop(uid, None)
        if self._rows.pop(uid, None) is not None:
            self._part()

    def is_plain(self, uid: int) -> bool:
        """Whether the row's next token is the likeliest one, whatever came before."""
        row = self._rows[uid]
        return row.params.greedy and not row.edited.active and not row.guided

    def expect(self, uids: Sequence[int]) -> None:
        """The next call is for these rows, in this order."""
        self._expected = self.at_work = uids

    def observe(self, logits: mx.array) -> None:
        """See the model's output, shape (rows, length, vocabulary), if it is about to be sampled from."""
        if self._expected is not None:
            self._logits = logits

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Tokens, shape (rows,), for log-probabilities of shape (rows, vocabulary).

        In single precision these are not evaluated, which would cost more than all the rest.
        """
        assert self._expected is not None, "expect() goes before each call"
        uids, self._expected = self._expected, None
        logits, self._logits = self._logits, None
        batch = self._batch
        if batch is None or batch.uids != uids:
            self._part()
            batch = self._batch = _Batch(list(uids), [self._rows[uid] for uid in uids], logprobs.shape[-1])
            self.shows = batch.shows
        raw = logprobs if logits is None else logits[:, -1, :]
        likely = decisive(raw, logprobs)
        if batch.plain:
            return mx.argmax(likely, axis=-1)
        return batch.sample(raw.astype(mx.float32), likely, self.faults)

    def _part(self) -> None:
        if self._batch is not None:
            self._batch.part()
            self._batch = None


class _Group:
    """Rows of a batch that one draw serves; `draw` is None for those that get their likeliest token.

    Attributes
    ----------
    plain : bool
        Whether their scores are as the model made them.
    """

    def __init__(self, rows: Sequence[_Row], places: list[int], draw: Draw | None) -> None:
        self.places = places
        self.plain = draw is None and not any(row.touched for row in rows)
        self._rows = rows
        self._draw = draw
        self._index = mx.array(places)

    def __call__(self, scores: mx.array) -> mx.array:
        if scores.shape[0] > len(self.places):
            scores = scores[self._index]
        if self._draw is None:
            return mx.argmax(scores, axis=-1)
        return self._draw(scores, [_mix(row.seed, row.position) for row in self._rows])


class _Batch:
    """Rows that are sampled together, and what is ready for them."""

    def __init__(self, uids: list[int], rows: list[_Row], size: int) -> None:
        self.uids = uids
        self.shows = any(row.params.logprobs is not None for row in rows)
        self._rows = rows
        self._edited = [i for i, row in enumerate(rows) if row.edited.active]
        self._guided = [i for i, row in enumerate(rows) if row.guided]
        self.plain = all(row.params.greedy and not row.touched for row in rows)
        if self.plain:
            return
        self._edits = Edits([rows[i].edited for i in self._edited], size) if self._edited else None
        self._edited_index = mx.array(self._edited)
        self._groups = list(_groups(rows, size))
        order = [place for group in self._groups for place in group.places]
        self._order = mx.array(sorted(range(len(order)), key=order.__getitem__))

    def sample(self, logits: mx.array, likely: mx.array, faults: dict[int, BaseException]) -> mx.array:
        """Tokens, shape (rows,); rows that get the token that is `likely` are judged by that alone."""
        scores = self._edit(logits, faults)
        drawn = [group(likely if group.plain else scores) for group in self._groups]
        tokens = drawn[0] if len(drawn) == 1 else mx.concatenate(drawn)[self._order]
        if self._edits is not None:
            self._edits.note(tokens if len(self._edited) == len(self._rows) else tokens[self._edited_index])
        for i in self._guided:
            self._rows[i].last = tokens[i : i + 1]
        for row in self._rows:
            row.position += 1
        return tokens

    def _edit(self, scores: mx.array, faults: dict[int, BaseException]) -> mx.array:
        if self._edits is not None:
            if len(self._edited) == len(self._rows):
                scores = self._edits(scores)
            else:
                scores[self._edited_index] = self._edits(scores[self._edited_index])
        for i in self._guided:
            uid, row = self.uids[i], self._rows[i]
            try:
                scores[i : i + 1] = _guide(row, scores[i : i + 1])
            except Exception as error:
                faults[uid] = error
            except BaseException as error:
                # SystemExit, say: it must end neither the engine nor the consumer's loop.
                faults[uid] = RuntimeError(f"a logits processor raised {error!r}")
        return scores

    def part(self) -> None:
        """Give the rows what is theirs, for other company."""
        if not self.plain and self._edits is not None:
            self._edits.part()


def _groups(rows: Sequence[_Row], size: int) -> Iterable[_Group]:
    kinds: dict[tuple[type[Draw] | None, int], list[int]] = {}
    for i, row in enumerate(rows):
        both = (None, row.touched) if row.params.greedy else draw_for(_wish(row.params), size)
        kinds.setdefault(both, []).append(i)
    for (kind, count), places in kinds.items():
        some = [rows[i] for i in places]
        wishes = [_wish(row.params) for row in some]
        draw: Draw | None = None
        if kind is not None:
            draw = FewDraw(wishes, count) if kind is FewDraw else kind(wishes)
        yield _Group(some, places, draw)


def _wish(params: SamplingParams) -> Wish:
    return Wish(params.temperature, params.top_k, params.top_p, params.min_p)


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


def _mix(seed: int, position: int) -> int:
    """32 bits from seed and position (the finaliser of SplitMix64, Steele et al. 2014)."""
    z = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0xFFFFFFFF
