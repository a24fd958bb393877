"""Biases and penalties: what requests have done to their logits, for all rows of a batch at once.

Only the logits of tokens that occur are touched, so a step costs little whatever the size of the vocabulary.
Knows nothing of draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..sampling import SamplingParams

__all__ = ["Edited", "Edits"]


class Edited:
    """One row: its parameters, and what its penalties remember."""

    __slots__ = ("_counts", "_history", "_made", "_prompt", "params", "size")

    def __init__(self, params: SamplingParams, prompt: Sequence[int], made: Sequence[int]) -> None:
        self.params = params
        self.size = len(prompt) + len(made)
        """Tokens so far."""
        self._prompt, self._made = prompt, made
        self._history: mx.array | None = None
        self._counts: mx.array | None = None

    @property
    def counted(self) -> bool:
        """Whether it matters how often a token was made."""
        return self.params.presence_penalty != 0 or self.params.frequency_penalty != 0

    @property
    def penalised(self) -> bool:
        """Whether any penalty applies."""
        return self.counted or self.params.repetition_penalty != 1

    @property
    def active(self) -> bool:
        """Whether its logits are changed at all."""
        return self.penalised or bool(self.params.logit_bias)

    def history(self) -> mx.array:
        """Tokens that the repetition penalty looks at, oldest first."""
        window = self.params.repetition_window or 0
        if self._history is None:
            self._history = mx.array([*self._prompt, *self._made][-window:], dtype=mx.uint32)
        return self._history[-window:]

    def counts(self, size: int) -> mx.array:
        """How often each token of the vocabulary was made, shape (1, vocabulary)."""
        if self._counts is None:
            self._counts = mx.zeros((1, size))
            if self._made:
                self._counts = self._counts.at[0, mx.array(list(self._made))].add(1)
        return self._counts

    def remember(self, history: mx.array | None, counts: mx.array | None) -> None:
        """Take back what a batch noted meanwhile."""
        if history is not None:
            self._history = history
        if counts is not None:
            self._counts = counts


class Edits:
    """The rows of one batch, as long as it stays the same; then `part`.

    Repetition as in Keskar et al. 2019 (arXiv:1909.05858), dividing what is above zero and multiplying what is
    below; presence and frequency are subtracted, as OpenAI defines them.
    """

    def __init__(self, rows: Sequence[Edited], size: int) -> None:
        self._rows = rows
        self._bias = _biases(rows)
        self._repetition: mx.array | None = None
        self._counts: mx.array | None = None
        if any(row.params.repetition_penalty != 1 for row in rows):
            self._repetition = mx.array([[row.params.repetition_penalty] for row in rows])
            histories = [row.history() for row in rows]
            longest = max(len(history) for history in histories)
            self._history = mx.stack([_padded(history, longest) for history in histories])
            windows = [row.params.repetition_window for row in rows]
            self._windows = mx.array([[window or _ALL] for window in windows]) if any(windows) else None
            self._longest = None if None in windows else max(window or 0 for window in windows)
        if any(row.counted for row in rows):
            self._presence = mx.array([[row.params.presence_penalty] for row in rows])
            self._frequency = mx.array([[row.params.frequency_penalty] for row in rows])
            self._counts = mx.concatenate([row.counts(size) for row in rows])
            self._numbers = mx.arange(len(rows))

    def __call__(self, logits: mx.array) -> mx.array:
        """Edited logits, shape (rows, vocabulary)."""
        if self._bias is not None:
            ids, bias = self._bias
            logits = mx.put_along_axis(logits, ids, mx.take_along_axis(logits, ids, axis=-1) + bias, axis=-1)
        if self._repetition is not None:
            ids = self._seen()
            found = mx.take_along_axis(logits, ids, axis=-1)
            scaled = mx.where(found > 0, found / self._repetition, found * self._repetition)
            logits = mx.put_along_axis(logits, ids, scaled, axis=-1)
        if self._counts is not None:
            logits = logits - self._presence * (self._counts > 0) - self._frequency * self._counts
        return logits

    def _seen(self) -> mx.array:
        """Tokens that the repetition penalty applies to; some more than once."""
        history = self._history
        if self._windows is None:
            return history
        back = mx.arange(history.shape[1], 0, -1)[None]
        return mx.where(back <= self._windows, history, history[:, -1:])

    def note(self, tokens: mx.array) -> None:
        """Take note of the rows' next tokens, shape (rows,)."""
        if self._repetition is not None:
            history = mx.concatenate([self._history, tokens[:, None].astype(mx.uint32)], axis=-1)
            self._history = history if self._longest is None else history[:, -self._longest :]
        if self._counts is not None:
            self._counts = self._counts.at[self._numbers, tokens].add(1)
        for row in self._rows:
            row.size += 1

    def part(self) -> None:
        """Give the rows what is theirs, for the next batch."""
        for i, row in enumerate(self._rows):
            history = counts = None
            if row.params.repetition_penalty != 1 and self._repetition is not None:
                history = self._history[i, -row.size :]
            if row.counted and self._counts is not None:
                counts = self._counts[i : i + 1]
            row.remember(history, counts)


_ALL = 1 << 30


def _padded(history: mx.array, length: int) -> mx.array:
    """A history made longer at the front by tokens that are in it."""
    missing = length - len(history)
    if not missing:
        return history
    return mx.concatenate([mx.broadcast_to(history[:1], (missing,)), history])


def _biases(rows: Sequence[Edited]) -> tuple[mx.array, mx.array] | None:
    """Token ids and what is added to their logits; rows with fewer than others have some twice."""
    pairs = [list((row.params.logit_bias or {0: 0.0}).items()) for row in rows]
    if not any(row.params.logit_bias for row in rows):
        return None
    longest = max(map(len, pairs))
    full = [each + each[:1] * (longest - len(each)) for each in pairs]
    ids = mx.array([[token for token, _ in each] for each in full], dtype=mx.uint32)
    return ids, mx.array([[float(bias) for _, bias in each] for each in full])
