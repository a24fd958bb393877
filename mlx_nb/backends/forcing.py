"""Answers that are known beforehand: to see what a model makes of a text that it did not choose."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..sampling import LogitsProcessor

__all__ = ["forced"]


def forced(token_ids: Sequence[int], prompt_length: int) -> LogitsProcessor:
    """A processor that leaves one token in each place: those of the answer, after a prompt of that many tokens.

    The log-probabilities of such an answer stay the model's own.
    """
    answer = list(token_ids)

    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        wanted = answer[tokens.shape[-1] - prompt_length]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, 0.0, -mx.inf)[None]

    return force
