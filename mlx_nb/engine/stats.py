"""Counters of an engine and rates over the last moments. Written by the engine thread, read by any."""

from __future__ import annotations

import time
from collections import deque

__all__ = ["Counters"]

WINDOW_S = 2.0


class Counters:
    """Totals since the start, and tokens a second over the last two seconds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.steps = 0
        self.processed = 0
        self.prompt_total = 0
        self.completion_total = 0
        self._recent: deque[tuple[float, int, int]] = deque()

    def step(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Note what one step did."""
        now = time.monotonic()
        self.steps += 1
        self.completion_total += completion_tokens
        self._recent.append((now, prompt_tokens, completion_tokens))
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt and generated tokens a second now."""
        since = time.monotonic() - WINDOW_S
        recent = [row for row in tuple(self._recent) if row[0] >= since]
        if not recent:
            return 0.0, 0.0
        span = max(time.monotonic() - recent[0][0], 0.05)
        return sum(r[1] for r in recent) / span, sum(r[2] for r in recent) / span
