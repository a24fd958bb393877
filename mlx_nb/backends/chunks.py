"""How many prompt tokens one prefill chunk takes: as many as it can in the time that others may have to wait."""

from __future__ import annotations

__all__ = ["ChunkSize"]

FIRST = 128
SMALLEST = 64
"""Tokens. A smaller chunk takes hardly less time: the weights are read once for each."""
SECONDS = 0.4
"""How long a chunk should take: other rows and aborts wait as long."""


class ChunkSize:
    """Adapts to the speed of the last chunk, up to `bound` tokens.

    It doubles or halves at most: the speed of small chunks says little about large ones, and on a GPU the first
    chunk of a kind takes the time of a compiler.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self.tokens = min(FIRST, bound)

    def took(self, tokens: int, seconds: float) -> None:
        """Take note of a chunk; the end of a prompt, which tells nothing, is passed over."""
        if tokens < SMALLEST // 2 or seconds <= 0:
            return
        ideal = int(tokens / seconds * SECONDS)
        self.tokens = min(max(ideal, self.tokens // 2, SMALLEST), 2 * self.tokens, self._bound)
