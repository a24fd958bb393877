"""The thread between one widget and what it shows.

Owns the pace: it publishes at most five times a second, only while somebody looks, and it carries out what
the buttons ask, so that neither the kernel's loop nor a busy cell ever waits for an engine.
Knows nothing of widgets or engines beyond two callables; it holds neither alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from .protocol import ViewChange

T = TypeVar("T")

INTERVAL = 0.2
"""Seconds between two publications, at the least."""


class Feed(Generic[T]):
    """Calls `publish` while views are open and `act` for each thing asked, on one daemon thread.

    Parameters
    ----------
    publish
        Called every `INTERVAL` seconds while a view is open; False ends the thread.
    act
        Called for each thing given to `ask`, in order and at once; False ends the thread.
    """

    def __init__(self, publish: Callable[[], bool], act: Callable[[T], bool]) -> None:
        self._publish = publish
        self._act = act
        self._wake = threading.Condition()
        self._views: dict[str, ViewChange] = {}
        self._asked: deque[T] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def view(self, change: ViewChange) -> None:
        """Note that a view can be seen, or no longer.

        Messages may overtake each other, as the kernel takes them on two shells: the order decides.
        """
        with self._wake:
            last = self._views.get(change.view)
            if last is None or change.order >= last.order:
                self._views[change.view] = change
                self._kick()

    def ask(self, what: T) -> None:
        """Have `act(what)` called soon."""
        with self._wake:
            self._asked.append(what)
            self._kick()

    def close(self) -> None:
        """End the thread; what was asked before and not begun is dropped. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1)

    def _kick(self) -> None:
        """Start the thread when there is work for it the first time, wake it otherwise (lock held)."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="mlx_nb widget", daemon=True)
            self._thread.start()
        self._wake.notify_all()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._wake:
                asked = self._wait(due)
                if self._closed:
                    return
            if not all(self._act(what) for what in asked):
                return
            if not asked:
                if not self._publish():
                    return
                due = time.monotonic() + INTERVAL

    def _wait(self, due: float) -> list[T]:
        """Return what was asked; nothing when it is time to publish, or the end (lock held)."""
        while not self._closed:
            if self._asked:
                asked = list(self._asked)
                self._asked.clear()
                return asked
            seen = any(view.open for view in self._views.values())
            left = due - time.monotonic()
            if seen and left <= 0:
                break
            self._wake.wait(left if seen else None)
        return []
