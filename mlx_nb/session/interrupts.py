"""Whether an interrupt may leave the code that runs now as KeyboardInterrupt.

In a kernel only a cell's own task may raise it: from any other task, or a callback, it ends the kernel's event loop,
and the kernel with it. There an interrupted call raises CancelledError instead.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["ends_the_loop", "watch_cells"]

_outside_cells: Callable[[], bool] | None = None


def watch_cells(outside_cells: Callable[[], bool] | None) -> None:
    """Have a kernel tell whether the code that runs now is on its loop, and no cell's; None for no kernel."""
    global _outside_cells  # noqa: PLW0603 - one process has one kernel
    _outside_cells = outside_cells


def ends_the_loop() -> bool:
    """Whether a KeyboardInterrupt raised here would end a kernel's loop."""
    return _outside_cells is not None and _outside_cells()
