"""One prompt on its way through an engine into a cell.

Blocking and awaited, it does the same: wait for the model, submit, draw what comes, and hand over a result. An
interrupt ends the request, keeps what there is, and ends the cell as interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError

from ..engine.core import EngineCore
from ..errors import MlxNbError
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from ..session.interrupts import ends_the_loop
from ..session.session import prefix_boundary_for, prompt_for, to_generation
from .kernel import interrupts_raise
from .result import Result
from .views import finish_line, view_for

__all__ = ["Ask", "Stream", "interrupted", "one_line_errors"]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of which engine; the result goes to the variable `out`, or is the magic's value."""

    core: EngineCore
    prompt: str
    params: SamplingParams
    system: str | None = None
    raw: bool = False
    out: str | None = None


class Stream:
    """Carries out one `Ask`, once."""

    def __init__(self, shell: Any, ask: Ask) -> None:
        self._shell, self._ask, self._core = shell, ask, ask.core
        self._id = f"cell-{uuid.uuid4().hex[:8]}"
        self._view = view_for(shell)
        self._last = RequestOutput(self._id)
        self._opened = False

    def run(self) -> Result | None:
        """Block until the answer is complete."""
        with interrupts_raise(), self._guarded():
            self._core.wait_ready()
            self._submit()
            for output in self._core.stream_sync(self._id):
                self._take(output)
        return self._finish()

    async def run_awaited(self) -> Result | None:
        """Await the answer; the loop goes on meanwhile."""
        later = asyncio.get_running_loop().call_later
        with self._guarded():
            await self._core.ready()
            self._submit()
            async for output in self._core.stream_outputs(self._id):
                self._take(output, later)
        return self._finish()

    def _submit(self) -> None:
        ask = self._ask
        prompt = prompt_for(
            self._core, ask.prompt, system=ask.system, raw=ask.raw, thinking=ask.params.thinking
        )
        boundary = prefix_boundary_for(
            self._core, ask.prompt, prompt, system=ask.system, thinking=ask.params.thinking
        )
        self._core.submit(prompt, ask.params, self._id, prefix_boundary=boundary, preview=ask.prompt)
        self._view.open()
        self._opened = True

    def _take(self, output: RequestOutput, later: Callable[..., Any] | None = None) -> None:
        self._last = output
        self._view.show(output.output_text, later)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever ends the stream early: the request ends with it, and the cell shows how far it came."""
        try:
            with one_line_errors():
                yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            self._last = replace(self._last, finished=True, finish_reason="abort")
        except BaseException:
            if self._opened:
                self._last = replace(self._last, finished=True, finish_reason="error")
                self._view.close(self._last.output_text, finish_line(self._last))
            raise
        finally:
            self._core.abort(self._id)

    def _finish(self) -> Result | None:
        """Hand the result over; an interrupted one as well, before the cell ends."""
        output = self._last
        if self._opened:
            self._view.close(output.output_text, finish_line(output))
        result = Result(to_generation(output, self._ask.params))
        if self._ask.out is not None:
            self._shell.push({self._ask.out: result}, interactive=False)
        if output.finish_reason != "abort":
            return result if self._ask.out is None else None
        if self._ask.out is None:
            self._shell.displayhook.update_user_ns(result)
        where = self._ask.out or "_"
        raise interrupted(
            f"generation interrupted; {where} holds the {output.completion_tokens} tokens so far"
        )


def interrupted(message: str) -> BaseException:
    """What ends a cell as interrupted, so that Run All stops, in one line instead of a traceback.

    In a task beside the cell's it ends that task as cancelled.
    """
    if ends_the_loop():
        return asyncio.CancelledError(message)
    error = KeyboardInterrupt(message)
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {message}"]  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors as IPython's UsageError: one line, no traceback (``%tb`` still has it)."""
    try:
        yield
    except UsageError:
        raise
    except (MlxNbError, ValueError) as error:
        raise UsageError(_line(error)) from error
    except Exception as error:  # a fault of the model or of a processor
        raise UsageError(f"the engine reports {type(error).__name__}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
