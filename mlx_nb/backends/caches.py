"""What kind a cache is, whichever library's class it has."""

from __future__ import annotations

from typing import Any

__all__ = ["is_recurrent"]


def is_recurrent(cache: Any) -> bool:
    """Whether it is a recurrent layer's state, for which mlx-lm and mlx-vlm have a class each."""
    return any(kind.__name__ == "ArraysCache" for kind in type(cache).__mro__)
