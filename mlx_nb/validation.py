"""Checks of single values; every error names the field and what it may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

__all__ = ["between", "choice", "flag", "integer", "number", "several"]


def integer(name: str, value: object, *, low: int | None = None, high: int | None = None) -> int:
    """Return ``value`` as an int within [low, high], or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    _within(name, int(value), low, high)
    return int(value)


def number(name: str, value: object, *, low: float | None = None, high: float | None = None) -> float:
    """Return ``value`` as a finite float within [low, high], or raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    _within(name, float(value), low, high)
    return float(value)


def between(name: str, value: object, low: float, high: float) -> float:
    """Return ``value`` as a float within [low, high], or raise ValueError."""
    return number(name, value, low=low, high=high)


def choice(name: str, value: object, allowed: Collection[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def flag(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def several(name: str, value: object) -> tuple[Any, ...]:
    """Return the items of a list (none for None), or raise ValueError."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list, got {value!r}")
    return tuple(value)


def _within(name: str, value: float, low: float | None, high: float | None) -> None:
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = (
            f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
        )
        raise ValueError(f"{name} must be {bounds}, got {value}")
