"""Ctrl-C during a job, taken note of between two rows instead of raised in the middle of one."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from ..engine.interrupts import on_sigint

__all__ = ["on_interrupt"]


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

    with on_sigint(handle):
        yield
