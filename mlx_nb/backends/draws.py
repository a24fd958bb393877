"""One draw a row: temperature, then top_k, top_p and min_p, then a token.

The draw is Gumbel-max: the noise of a candidate depends on the request's seed, its position and the token id
alone, so a seeded request gives the same text in any company. Knows nothing of requests or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

__all__ = [
    "Draw", "FewDraw", "FreeDraw", "NucleusDraw", "Wish", "decisive", "draw_for", "likeliest", "normalized",
]  # fmt: skip

FEW = 64
"""Tokens that are looked at for rows with a smaller top_k; those with a larger one have the next power of two."""
NUCLEI = (128, 2048)
"""Tokens that top_p looks at first, and those it looks at next where they were too few; then it is a full sort."""
BLOCK = 32
_POWERS_OF_2 = (
    2.16138083e-04, 1.24673764e-03, 9.67553263e-03,
    5.54852202e-02, 2.40229325e-01, 6.93147042e-01,
)  # fmt: skip
"""Coefficients of x^6 to x of a polynomial for 2^x - 1 on [0, 1), least squares of the relative error."""


def normalized(logits: mx.array) -> mx.array:
    """Log-probabilities, of the same shape."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def decisive(logits: mx.array, logprobs: mx.array | None = None) -> mx.array:
    """What tells the likeliest token.

    In half precision these are the log-probabilities, as for mlx-lm, which round otherwise; in single precision the
    logits do, and the exponential of each is spared.
    """
    if logits.dtype == mx.float32:
        return logits
    return normalized(logits) if logprobs is None else logprobs


class Wish(NamedTuple):
    """What a row asks of its draws."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Draw:
    """Draws for some rows, whose parameters stay the same from call to call."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        self._temperature = mx.array([[wish.temperature] for wish in wishes])
        self._top_p = mx.array([[wish.top_p] for wish in wishes])
        self._min_p = mx.log(mx.array([[wish.min_p] for wish in wishes]))

    def __call__(self, scores: mx.array, seeds: Sequence[int]) -> mx.array:
        """Tokens, shape (rows,), for scores of shape (rows, vocabulary) and 32 bits of seed for each row."""
        raise NotImplementedError


class FewDraw(Draw):
    """For rows with a top_k of at most `count` tokens."""

    def __init__(self, wishes: Sequence[Wish], count: int) -> None:
        super().__init__(wishes)
        self._count = count
        self._kept = mx.arange(count)[None] < mx.array([[wish.top_k] for wish in wishes])

    def __call__(self, scores: mx.array, seeds: Sequence[int]) -> mx.array:
        """See `Draw`."""
        ids, values = likeliest(scores, self._count)
        values = mx.where(self._kept, values.astype(mx.float32) / self._temperature, -mx.inf)
        inside = mx.logsumexp(values, axis=-1, keepdims=True)
        kept = self._kept & _nucleus(values, inside, self._top_p, self._min_p)
        return _drawn(ids, values, kept, seeds)


class NucleusDraw(Draw):
    """For rows with a top_p, which may need any number of tokens."""

    def __call__(self, scores: mx.array, seeds: Sequence[int]) -> mx.array:
        """See `Draw`."""
        scaled = scores.astype(mx.float32) / self._temperature
        # To look whether the first tokens are enough is to wait for them. That costs a GPU more than the full sort.
        if mx.default_device() == mx.cpu:
            return _nuclear(scaled, _logsumexp(scaled), self._top_p, self._min_p, seeds, NUCLEI)
        whole = mx.logsumexp(scaled, axis=-1, keepdims=True)
        return _nuclear(scaled, whole, self._top_p, self._min_p, seeds, ())


class FreeDraw(Draw):
    """For rows that may get any token, or any that is not too unlikely."""

    def __init__(self, wishes: Sequence[Wish]) -> None:
        super().__init__(wishes)
        self._bounded = any(wish.min_p for wish in wishes)

    def __call__(self, scores: mx.array, seeds: Sequence[int]) -> mx.array:
        """See `Draw`."""
        scaled = scores.astype(mx.float32) / self._temperature
        noise = mx.vmap(lambda key: mx.random.gumbel((scaled.shape[-1],), key=key))(
            mx.array([[0, seed] for seed in seeds], dtype=mx.uint32)
        )
        drawn = scaled + noise
        if self._bounded:
            least = mx.max(scaled, axis=-1, keepdims=True) + self._min_p
            drawn = mx.where(scaled >= least, drawn, -mx.inf)
        return mx.argmax(drawn, axis=-1)


def draw_for(wish: Wish, size: int) -> tuple[type[Draw], int]:
    """Which kind of draw suits a row, and for how many tokens if that is fixed; rows that agree share one."""
    if 0 < wish.top_k < size:
        count = FEW
        while count < wish.top_k:
            count *= 2
        return FewDraw, min(count, size)
    return (NucleusDraw if wish.top_p < 1 else FreeDraw), 0


def likeliest(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` tokens of each row with the highest scores, highest first, and their scores; ties by id."""
    rows, size = scores.shape
    if count >= size:
        ids = mx.argsort(-scores, axis=-1)
        return ids, mx.take_along_axis(scores, ids, axis=-1)
    if size >= 4 * BLOCK * count:
        ids = _in_blocks(scores, count, rows, size)
    else:
        ids = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
    ids = mx.sort(ids, axis=-1)
    values = mx.take_along_axis(scores, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)


def _in_blocks(scores: mx.array, count: int, rows: int, size: int) -> mx.array:
    """As many of the highest: they lie in the blocks with the highest maxima, which are far fewer tokens."""
    missing = -size % BLOCK
    if missing:
        scores = mx.concatenate([scores, mx.full((rows, missing), -mx.inf, scores.dtype)], axis=-1)
    blocks = scores.reshape(rows, -1, BLOCK)
    chosen = mx.argpartition(-mx.max(blocks, axis=-1), count - 1, axis=-1)[:, :count, None]
    values = mx.take_along_axis(blocks, chosen, axis=1).reshape(rows, -1)
    ids = (chosen * BLOCK + mx.arange(BLOCK, dtype=mx.uint32)).reshape(rows, -1)
    places = mx.argpartition(-values, count - 1, axis=-1)[:, :count]
    return mx.take_along_axis(ids, places, axis=-1)


def _nuclear(
    scaled: mx.array,
    whole: mx.array,
    top_p: mx.array,
    min_p: mx.array,
    seeds: Sequence[int],
    counts: Sequence[int],
) -> mx.array:
    size = scaled.shape[-1]
    count = counts[0] if counts and counts[0] < size else size
    ids, values = likeliest(scaled, count)
    kept = _nucleus(values, whole, top_p, min_p)
    tokens = _drawn(ids, values, kept, seeds)
    if count < size:
        short = [i for i, cut in enumerate(kept[:, -1].tolist()) if cut]  # type: ignore[arg-type]
        if short:
            at = mx.array(short)
            tokens[at] = _nuclear(
                scaled[at], whole[at], top_p[at], min_p[at], [seeds[i] for i in short], counts[1:]
            )
    return tokens


def _nucleus(values: mx.array, whole: mx.array, top_p: mx.array, min_p: mx.array) -> mx.array:
    """Which tokens, likeliest first, make up `top_p` of the mass `whole` and are not too unlikely."""
    probabilities = mx.exp(values - whole)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    return ((before < top_p) | (top_p >= 1)) & (values >= values[:, :1] + min_p)


def _logsumexp(values: mx.array) -> mx.array:
    """Along the last axis, to some 1e-7 of the sum: MLX's takes a scalar exponential of each value on most CPUs.

    2 to the power of x is a polynomial on [0, 1), scaled by the exponent's bits; these loops are vectorised.
    """
    top = mx.max(values, axis=-1, keepdims=True)
    powers = mx.maximum((values - top) * 1.4426950408889634, -126.0)
    whole = mx.floor(powers)
    rest = powers - whole
    terms = rest * _POWERS_OF_2[0]
    for factor in _POWERS_OF_2[1:]:
        terms = (terms + factor) * rest
    scale = mx.left_shift(whole.astype(mx.int32) + 127, 23).view(mx.float32)
    return top + mx.log(mx.sum((terms + 1.0) * scale, axis=-1, keepdims=True))


def _drawn(ids: mx.array, values: mx.array, kept: mx.array, seeds: Sequence[int]) -> mx.array:
    places = mx.broadcast_to(mx.array(list(seeds), dtype=mx.uint32)[:, None], ids.shape)
    noise = mx.vmap(mx.vmap(lambda key: mx.random.gumbel((), key=key)))(mx.stack([places, ids], axis=-1))
    best = mx.argmax(mx.where(kept, values + noise, -mx.inf), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[:, 0]
