"""Waiting for an engine from a loop or a thread, without polling and without the engine ever waiting back."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable

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


class LoopNews:
    """News of one answer for one consumer on an event loop.

    Steps closer together than `interval` seconds arrive in one wake-up.
    """

    def __init__(self, answer: Answer, interval: float) -> None:
        self._answer = answer
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._armed = False
        self._last = 0.0
        answer.watch(self, self._wake)

    def _wake(self) -> None:  # the engine's thread
        if not self._armed:
            self._armed = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._arrive)

    def _arrive(self) -> None:
        delay = self._last + self._interval - self._loop.time()
        if delay > 0:
            self._loop.call_later(delay, self._open)
        else:
            self._open()

    def _open(self) -> None:
        self._armed = False
        self._last = self._loop.time()
        self._event.set()

    async def wait(self, timeout: float | None) -> None:
        """Wait for news since the last wait; TimeoutError after `timeout` seconds."""
        await asyncio.wait_for(self._event.wait(), timeout)
        self._event.clear()

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
