"""How many prompt tokens one prefill chunk takes: as many as it can in the time that others may have to wait."""

from __future__ import annotations

__all__ = ["FIRST", "ChunkSize"]

FIRST = 128
SMALLEST = 64
"""Tokens of all rows together. A smaller chunk takes hardly less time: the weights are read once for each."""
SECONDS = 0.4
"""How long a chunk should take: other rows and aborts wait as long."""


class ChunkSize:
    """Adapts to the speed of the last chunk, up to `bound` tokens of a row.

    It doubles or halves at most: the speed of small chunks says little about large ones, and on a GPU the first
    chunk of a kind takes the time of a compiler.

    Attributes
    ----------
    tokens : int
        Of one row.
    speed : float
        Tokens a second of the last chunk that was long enough to tell.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.tokens = min(FIRST, bound)
        self.speed = 0.0

    def took(self, tokens: int, seconds: float, rows: int = 1) -> None:
        """Take note of a chunk of all rows; the end of a prompt, which tells nothing, is passed over."""
        if tokens < SMALLEST // 2 or seconds <= 0:
            return
        self.speed = tokens / seconds
        ideal = int(self.speed * SECONDS / rows)
        smallest = max(1, SMALLEST // rows)
        self.tokens = min(max(ideal, self.tokens // 2, smallest), 2 * self.tokens, self._bound)
