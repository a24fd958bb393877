"""The past of the monitor's sparklines: one sample a second, two minutes deep.

Kept in Python, so that every view of one monitor draws the same line and a reloaded page still has it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .protocol import HISTORY_SECONDS, HistoryBand


class History:
    """Samples of the decode and prefill rates; a second in which nobody sampled is None, not zero."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: int | None = None
        self._decode: deque[float | None] = deque(maxlen=HISTORY_SECONDS)
        self._prefill: deque[float | None] = deque(maxlen=HISTORY_SECONDS)
        self._decode_peak = 0.0
        self._prefill_peak = 0.0

    def add(self, decode: float, prefill: float) -> None:
        """Take a sample, unless this second already has one."""
        second = int(self._clock())
        if second == self._last:
            return
        if self._last is not None:
            gap = min(second - self._last - 1, HISTORY_SECONDS)
            self._decode.extend([None] * gap)
            self._prefill.extend([None] * gap)
        self._last = second
        self._decode.append(decode)
        self._prefill.append(prefill)
        self._decode_peak = max(self._decode_peak, decode)
        self._prefill_peak = max(self._prefill_peak, prefill)

    def band(self) -> HistoryBand:
        """Return the samples, oldest first."""
        return {
            "decode": list(self._decode),
            "prefill": list(self._prefill),
            "decode_peak": self._decode_peak,
            "prefill_peak": self._prefill_peak,
        }
