"""An answer that comes while the notebook goes on.

It has a thread of its own, which ends with it: cells that block don't hold it up, and it needs no event loop. What it
draws stays in the cell where it began.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython

from .kernel import current_cell, in_kernel, interrupts_raise
from .result import Result, Samples
from .stream import Ask, Stream, one_line_errors
from .views import place

__all__ = ["Background"]


class Background:
    """A handle on an answer: await it, or call `result`.

    What can be refused at once is refused here; a fault that comes later is raised by `result`.
    """

    def __init__(self, shell: Any, ask: Ask) -> None:
        self._shell, self._out = shell, ask.out
        self._cell = current_cell(shell)
        self._stream = Stream(shell, ask, background=True)
        self._future: Future[Result | Samples] = Future()
        self._future.set_running_or_notify_cancel()  # cancelling a wait for it leaves it alone
        self._redrawn = False
        with one_line_errors():
            if ask.core.state == "running":
                self._stream.submit()
        self._stream.open()
        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(self._work,), name="mlx_nb background", daemon=True
        ).start()

    def hand_over(self) -> Background | None:
        """The handle as the cell's value, or nothing once it is in the variable of ``-o``."""
        if self._out is None:
            return self
        self._shell.push({self._out: self}, interactive=False)
        return None

    def _work(self) -> None:
        try:
            self._stream.work()
            result = self._stream.result
        except UsageError as error:  # one line for a cell; code may want to know what it was
            self._future.set_exception(error.__cause__ or error)
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)

    def __await__(self) -> Generator[Any, None, Result | Samples]:
        return self._awaited().__await__()

    async def _awaited(self) -> Result | Samples:
        try:
            return await asyncio.wrap_future(self._future)
        finally:
            self._redraw()

    def _redraw(self) -> None:
        """For those (nbclient) who leave out what a cell draws after its end: the cell that waits draws it again."""
        if self._future.done() and not self._redrawn and self._cell != current_cell(self._shell):
            self._redrawn = True
            self._stream.redraw()

    def result(self, timeout: float | None = None) -> Result | Samples:
        """Wait for the answer (a list of them for several samples).

        Raises
        ------
        TimeoutError
            After `timeout` seconds; the answer goes on.
        MlxNbError or other
            What ended the request.
        """
        with interrupts_raise():
            try:
                return self._future.result(timeout)
            except TimeoutError:
                if self._future.done():  # it is the request's own
                    raise
                raise TimeoutError(f"the answer is not complete after {timeout:g} s; it goes on") from None
            finally:
                self._redraw()

    @property
    def text(self) -> str | list[str]:
        """The answer so far; a list of them for several samples."""
        texts = [output.output_text for output in self._stream.outputs]
        return texts if isinstance(self._stream.result, Samples) else texts[0]

    @property
    def done(self) -> bool:
        """Whether it has ended, in any way."""
        return self._future.done()

    def abort(self) -> bool:
        """End it and keep what there is; True if it had not ended."""
        if self._future.done():
            return False
        self._stream.abort()
        return True

    def __repr__(self) -> str:
        made = sum(output.completion_tokens for output in self._stream.outputs)
        return f"<answer in the background: {self._state()}, {made:,} tokens>"

    def _state(self) -> str:
        if not self._future.done():
            return "running"
        if (error := self._future.exception()) is not None:
            return f"failed ({' '.join(str(error).split())})"
        return ", ".join(dict.fromkeys(str(output.finish_reason) for output in self._stream.outputs))

    def _ipython_display_(self) -> None:
        if not in_kernel(get_ipython()):
            raise NotImplementedError  # a terminal prints the repr
        if self._cell != current_cell(get_ipython()):
            place({"text/plain": repr(self)})
