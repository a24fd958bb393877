"""Python's switch interval while an engine works.

A cell that is busy in pure Python makes the engine thread wait up to one interval (5 ms by default) at each
release of the interpreter lock, several times a step. A shorter interval keeps decoding near its idle speed at
the cost of a few percent for the cell.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["BUSY_INTERVAL_S", "BusyInterval"]

BUSY_INTERVAL_S = 0.0005

_lock = threading.Lock()
_busy = 0
_before = 0.0


class BusyInterval:
    """One engine's share in the short interval: it holds while any engine has entered and not left."""

    def __init__(self) -> None:
        self._entered = False

    def enter(self) -> None:
        """This engine has work."""
        global _busy, _before
        if self._entered:
            return
        with _lock:
            if _busy == 0:
                _before = sys.getswitchinterval()
                sys.setswitchinterval(min(_before, BUSY_INTERVAL_S))
            _busy += 1
            self._entered = True

    def leave(self) -> None:
        """This engine is idle: what was set before comes back, unless someone changed it since."""
        global _busy
        if not self._entered:
            return
        with _lock:
            _busy -= 1
            self._entered = False
            if _busy == 0 and abs(sys.getswitchinterval() - min(_before, BUSY_INTERVAL_S)) < 1e-9:
                sys.setswitchinterval(_before)
