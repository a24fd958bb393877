"""What has to be known of ipykernel: how its interrupts reach a cell that waits."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ..engine.interrupts import ends_the_loop

__all__ = ["current_cell", "in_kernel", "interrupts_raise", "interrupts_wake"]


def in_kernel(shell: Any) -> bool:
    """Whether the shell belongs to a Jupyter kernel."""
    return getattr(shell, "kernel", None) is not None


def current_cell(shell: Any) -> object:
    """What tells the cell that runs now from others, those of subshells included."""
    if in_kernel(shell):
        # Not display_pub's header: under %%capture that is another's.
        return shell.parent_header.get("header", {}).get("msg_id")
    return getattr(shell, "execution_count", None)


def interrupts_wake() -> None:
    """Until the end of the cell, if it awaits, have an interrupt cancel it at once.

    ipykernel's handler queues a callback that cancels the cell but doesn't wake the loop, which may sleep for
    seconds before it looks. Signals reach the main thread only, so there is nothing to do in a subshell. At the
    cell's end ipykernel puts back what was there before it.
    """
    handle = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or not callable(handle)
        or handle is signal.default_int_handler  # the cell awaits nothing
        or isinstance(handle, _Waking)
    ):
        return
    with contextlib.suppress(RuntimeError):  # no loop runs
        signal.signal(signal.SIGINT, _Waking(handle, asyncio.get_running_loop()))


class _Waking:
    def __init__(self, handle: Callable[[int, Any], object], loop: asyncio.AbstractEventLoop) -> None:
        self._handle, self._loop = handle, loop

    def __call__(self, number: int, frame: Any) -> None:
        self._handle(number, frame)
        self._loop.call_soon_threadsafe(lambda: None)


@contextlib.contextmanager
def interrupts_raise() -> Iterator[None]:
    """While a cell blocks, have an interrupt raise KeyboardInterrupt, or CancelledError where that ends the loop.

    It does so by itself in a cell that awaits nothing. In one that awaits, ipykernel's handler would queue a
    callback for a loop that is blocked.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if ends_the_loop():
            raise asyncio.CancelledError(*interrupt.args) from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)
