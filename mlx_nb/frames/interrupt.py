"""Ctrl-C during a job, taken note of between two rows instead of raised in the middle of one."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from ..session.interrupts import ends_the_loop

__all__ = ["interruptible", "on_interrupt"]

Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def on_interrupt(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at the first SIGINT; the second raises KeyboardInterrupt wherever the thread is."""
    noted = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal noted
        if noted:
            signal.default_int_handler(signum, frame)
        noted = True
        note()

    with _sigint(handle):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, or CancelledError where that would end a kernel's loop.

    In a cell that awaits, a kernel's own handler would only cancel the cell's task, which can't run while a call
    blocks.
    """
    try:
        with _sigint(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        if ends_the_loop():
            raise asyncio.CancelledError from None
        raise


@contextlib.contextmanager
def _sigint(handler: Handler) -> Iterator[None]:
    # Only the main thread gets signals. A process told to ignore them, or whose handler Python can't put back
    # (None), is left as it is.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
