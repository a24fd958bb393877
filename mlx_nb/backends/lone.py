"""A row over plain caches: the fastest way there is for one alone.

Decoding runs one step ahead: while a token is read, the next one is being computed. Knows nothing of batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .draws import normalized
from .samplers import RowSampler

__all__ = ["Ahead", "Drawn", "Lone", "draw", "extracted"]

Drawn = tuple[mx.array, mx.array]
"""A token, shape (1,), and the log-probabilities that it was drawn from, shape (vocabulary,)."""

CLEAR_EVERY = 512
"""Tokens after which MLX's pool is emptied: caches that grew leave theirs behind."""


def draw(sampler: RowSampler, uid: int, logits: mx.array) -> Drawn:
    """A row's token for logits of one place, shape (1, 1, vocabulary)."""
    sampler.expect([uid])
    sampler.observe(logits)
    logprobs = normalized(logits[:, -1, :])
    return sampler(logprobs), logprobs[0]


class Ahead:
    """The token after the one that is read, in the making.

    Parameters
    ----------
    feed : callable
        Puts a token, shape (1,), into the row's caches; logits, shape (1, 1, vocabulary).
    drawn : Drawn, optional
        The token to be read next; without it `begin` goes first.
    """

    def __init__(
        self,
        feed: Callable[[mx.array], mx.array],
        sampler: RowSampler,
        uid: int,
        drawn: Drawn | None = None,
    ) -> None:
        self._feed, self._sampler, self._uid = feed, sampler, uid
        self._drawn = drawn

    @property
    def drawn(self) -> Drawn:
        """What is read next; it has not been fed."""
        assert self._drawn is not None, "begin() goes first"
        return self._drawn

    def begin(self, token: mx.array) -> None:
        """Have the token after this one computed."""
        self._sampler.expect([self._uid])  # before the call: what that raises is this row's fault
        self._drawn = draw(self._sampler, self._uid, self._feed(token))
        mx.async_eval(*self._drawn[: 1 + self._sampler.shows])  # type: ignore[no-untyped-call]

    def step(self) -> tuple[int, mx.array]:
        """The next token and its log-probabilities, with the one after it begun."""
        token, logprobs = self.drawn
        self.begin(token)
        return int(token.item()), logprobs  # type: ignore[arg-type]


class Lone:
    """A row in decode, with caches of its own.

    Attributes
    ----------
    uid : int
        The row, to the sampler.
    state : list
        Its caches, which cover `tokens`.
    tokens : list of int
        Of its prompt, and those that were read.
    """

    def __init__(
        self, model: Any, sampler: RowSampler, uid: int, state: list[Any], tokens: list[int], drawn: Drawn
    ) -> None:
        self.uid, self.state, self.tokens = uid, state, tokens
        self._ahead = Ahead(functools.partial(_feed, model, state), sampler, uid, drawn)

    @property
    def drawn(self) -> Drawn:
        """What comes after `tokens`."""
        return self._ahead.drawn

    def step(self) -> tuple[int, mx.array]:
        """See `Ahead.step`."""
        token, logprobs = self._ahead.step()
        self.tokens.append(token)
        if len(self.tokens) % CLEAR_EVERY == 0:
            mx.clear_cache()
        return token, logprobs

    def extract(self) -> list[Any]:
        """A copy of its caches, as long as they need be."""
        return extracted(self.state)

    @property
    def nbytes(self) -> int:
        """Of its caches."""
        return sum(int(cache.nbytes) for cache in self.state)


def extracted(state: list[Any]) -> list[Any]:
    """A copy of caches that hold something, as long as they need be."""
    return [cache.merge([cache]).extract(0) for cache in state]


def _feed(model: Any, state: list[Any], token: mx.array) -> mx.array:
    logits: mx.array = model(token[None], cache=state)
    return logits
