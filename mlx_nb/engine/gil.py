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


class BusyInterval:
    """One engine's share in the short interval: it holds while any engine has entered and not left."""

    _lock = threading.Lock()
    _busy = 0
    _before = 0.0
    _set = 0.0

    def __init__(self) -> None:
        self._entered = False

    def enter(self) -> None:
        """Note that this engine has work."""
        if self._entered:
            return
        self._entered = True
        shared = BusyInterval
        with shared._lock:
            if shared._busy == 0:
                shared._before = sys.getswitchinterval()
                sys.setswitchinterval(min(shared._before, BUSY_INTERVAL_S))
                shared._set = sys.getswitchinterval()
            shared._busy += 1

    def leave(self) -> None:
        """Note that it has none: what was set before comes back, unless someone changed it since."""
        if not self._entered:
            return
        self._entered = False
        shared = BusyInterval
        with shared._lock:
            shared._busy -= 1
            if shared._busy == 0 and sys.getswitchinterval() == shared._set:
                sys.setswitchinterval(shared._before)
