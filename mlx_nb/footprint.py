"""How much memory the KV caches of a batch take, in plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KVFootprint"]

STEP = 256
"""Tokens by which caches grow at a time."""


@dataclass(frozen=True, slots=True)
class KVFootprint:
    """Bytes of one row's caches, as measured on a model.

    Attributes
    ----------
    per_token : int
        Of layers that keep every token.
    windows : tuple of (int, int)
        Bytes a token and the most tokens kept, of layers that keep the last ones.
    fixed : int
        Of recurrent layers, whatever the length.
    """

    per_token: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    fixed: int = 0

    def bytes(self, lengths: Sequence[int]) -> int:
        """Of a batch of rows of these lengths in tokens: all rows are as long as the longest."""
        if not lengths:
            return 0
        longest = -(-max(lengths) // STEP) * STEP
        row = (
            self.per_token * longest
            + sum(size * min(longest, most) for size, most in self.windows)
            + self.fixed
        )
        return row * len(lengths)
