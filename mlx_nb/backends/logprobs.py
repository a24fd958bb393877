"""Log-probabilities of a step as plain values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..outputs import TokenLogprob

__all__ = ["logprob_of"]


def logprob_of(token: int, logprobs: mx.array, count: int) -> TokenLogprob:
    """That of `token`, and the `count` highest, from an array of shape (vocabulary,)."""
    top: dict[int, float] = {}
    if count:
        count = min(count, logprobs.shape[-1])
        ids = mx.argpartition(-logprobs, count - 1)[:count]
        values = logprobs[ids]
        pairs: Any = zip(ids.tolist(), values.tolist(), strict=True)  # type: ignore[arg-type]
        top = dict(sorted(pairs, key=lambda pair: -pair[1]))
    return TokenLogprob(token, float(logprobs[token].item()), top)  # type: ignore[arg-type]
