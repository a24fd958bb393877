"""Whether an interrupt may leave the code that runs now as KeyboardInterrupt.

In a kernel only a cell's own task may raise it: from any other task, or a callback, it ends the kernel's event loop,
and the kernel with it. There an interrupted call raises CancelledError instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["ends_the_loop", "interruptible", "on_sigint", "watch_cells"]

Handler = Callable[[int, FrameType | None], object]

_outside_cells: Callable[[], bool] | None = None


def watch_cells(outside_cells: Callable[[], bool] | None) -> None:
    """Have a kernel tell whether the code that runs now is on its loop, and no cell's; None for no kernel."""
    global _outside_cells  # noqa: PLW0603 - one process has one kernel
    _outside_cells = outside_cells


def ends_the_loop() -> bool:
    """Whether a KeyboardInterrupt raised here would end a kernel's loop."""
    return _outside_cells is not None and _outside_cells()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, or CancelledError where that would end a kernel's loop.

    In a cell that awaits, a kernel's own handler would only cancel the cell's task, which can't run while a call
    blocks.
    """
    try:
        with on_sigint(signal.default_int_handler):
            yield
    except KeyboardInterrupt:
        if ends_the_loop():
            raise asyncio.CancelledError from None
        raise


@contextlib.contextmanager
def on_sigint(handler: Handler) -> Iterator[None]:
    """Handle SIGINT so, where this thread gets it.

    Only the main thread does. A process told to ignore it, or whose handler Python can't put back (None), is left
    as it is.
    """
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
