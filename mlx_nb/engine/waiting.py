"""Waiting for an engine from a loop or a thread, without polling and without the engine ever waiting back."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from .answer import Answer
from .interrupts import interruptible

__all__ = ["LoopNews", "ThreadNews", "on_loop", "on_thread"]

Register = Callable[[Callable[[], None]], None]


async def on_loop(register: Register) -> None:
    """Wait on the running loop until the wake that `register` is given is called, from whatever thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not future.done():
            future.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle)

    register(wake)
    await future


def on_thread(register: Register, timeout: float | None = None) -> bool:
    """Block this thread until woken; False if `timeout` seconds passed first. Ctrl-C gets through."""
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    register(lambda: woken.put(None))
    try:
        with interruptible():
            woken.get(timeout=timeout)
    except queue.Empty:
        return False
    return True


class _Bell:
    """Wakes a loop once for all answers that have news: whatever a step brings, it is one call.

    Steps closer together than `interval` seconds arrive in one wake-up.
    """

    _bells: ClassVar[weakref.WeakValueDictionary[tuple[int, float], _Bell]] = weakref.WeakValueDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._loop = loop
        self._interval = interval
        self._ready: deque[LoopNews] = deque()
        self._rung = False
        self._last = 0.0

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop, interval: float) -> _Bell:
        """The bell of a loop, called on it; there is one as long as anybody listens."""
        bell = cls._bells.get((id(loop), interval))
        if bell is None:
            bell = cls._bells[id(loop), interval] = cls(loop, interval)
        return bell

    def ring(self, news: LoopNews) -> None:
        """Have an answer's news delivered; from any thread."""
        self._ready.append(news)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        delay = self._last + self._interval - self._loop.time()
        if delay > 0:
            self._loop.call_later(delay, self._open)
        else:
            self._open()

    def _open(self) -> None:
        self._rung = False  # first: what is added from here on rings again
        self._last = self._loop.time()
        while self._ready:
            self._ready.popleft().deliver()


class LoopNews:
    """News of one answer for one consumer on an event loop.

    Steps closer together than `interval` seconds arrive in one wake-up.
    """

    def __init__(self, answer: Answer, interval: float) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._bell = _Bell.of(self._loop, interval)
        self._rung = False
        self._coming = self._loop.create_future()
        answer.watch(self, self._wake)

    def _wake(self) -> None:  # the engine's thread
        if not self._rung:
            self._rung = True
            self._bell.ring(self)

    def deliver(self) -> None:
        """Let the consumer have the news; on its loop."""
        self._rung = False
        if not self._coming.done():
            self._coming.set_result(None)

    def coming(self) -> asyncio.Future[None]:
        """Done once there is news since the last one that was done."""
        if self._coming.done():
            self._coming = self._loop.create_future()
        return self._coming

    def close(self) -> None:
        """Stop listening."""
        self._answer.unwatch(self)


class ThreadNews:
    """News of one answer for one consumer on a plain thread."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()
        answer.watch(self, lambda: self._queue.put(None))

    def wait(self, timeout: float | None) -> None:
        """Block until there is news; TimeoutError after `timeout` seconds. Ctrl-C gets through."""
        try:
            with interruptible():
                self._queue.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no output within {timeout} s") from None

    def close(self) -> None:
        """Stop listening."""
        self._answer.unwatch(self)
