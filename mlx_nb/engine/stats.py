"""Counters of an engine and rates over the last moments. Written by the engine thread, read by any."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["Counters"]

WINDOW_S = 2.0


class _Work:
    """Tokens, and the seconds they took."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


class Counters:
    """Totals since the start, and tokens a second over the last two seconds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.steps = 0
        self.processed = 0
        self.prompt_total = 0
        self.completion_total = 0
        self._recent: deque[tuple[float, int, int]] = deque()
        self._prefill, self._decode = _Work(), _Work()

    def step(self, prompt_tokens: int, completion_tokens: int, seconds: float) -> None:
        """Note what one step did, and how long it took."""
        now = time.monotonic()
        if prompt_tokens:
            self._prefill.add(prompt_tokens, seconds)
        elif completion_tokens:
            self._decode.add(completion_tokens, seconds)
        self.steps += 1
        self.completion_total += completion_tokens
        self._recent.append((now, prompt_tokens, completion_tokens))
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def measured(self) -> dict[str, float | None]:
        """Prompt and generated tokens a second of all steps that were at it; None before the first."""
        return {"mean_prompt_tps": self._prefill.rate, "mean_generation_tps": self._decode.rate}

    def rates(self) -> tuple[float, float]:
        """Prompt and generated tokens a second now."""
        since = time.monotonic() - WINDOW_S
        recent = [row for row in tuple(self._recent) if row[0] >= since]
        if not recent:
            return 0.0, 0.0
        span = max(time.monotonic() - recent[0][0], 0.05)
        return sum(r[1] for r in recent) / span, sum(r[2] for r in recent) / span
