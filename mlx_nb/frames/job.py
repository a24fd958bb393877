"""The one loop that runs prompts over rows.

Rows are read when there is room for them: at most `WINDOW` times the engine's batch is with the engine, so that the
batch stays full and memory bounded however many rows there are. One thread (or one loop) reads rows, submits and
records; the engine's thread only puts results into an inbox. Knows nothing of DataFrames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..errors import MlxNbError
from ..outputs import RequestOutput
from ..sampling import SamplingParams
from .interrupt import on_interrupt

__all__ = ["Ask", "Job", "Outcome", "Skipped"]

WINDOW = 2
"""Rows with the engine, in batches: one that runs, and one that waits to take its place."""

LOOP_SHARE_S = 0.005
"""Seconds that an event loop is held at most while rows are being started."""

Row = TypeVar("Row")


class Skipped(Exception):
    """A row that holds no prompt; the message says why."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a row asks of the engine; `text` is shown while it runs."""

    prompt: Prompt
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a row ended. `finish_reason` is the engine's, or "skipped"."""

    finish_reason: str
    text: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> Outcome:
        """That of a row the engine had."""
        aborted = output.finish_reason == "abort"
        unfinished = aborted or output.error is not None
        return cls(
            finish_reason=output.finish_reason or "error",
            text=(output.output_text or None) if unfinished else output.output_text,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=output.completion_tokens,
            cached_tokens=output.cached_tokens,
            error="aborted before it was finished" if aborted else _line(output.error),
        )

    @classmethod
    def failed(cls, error: Exception) -> Outcome:
        """That of a row the engine never took."""
        return cls("error", error=_line(error))


class Job(Generic[Row]):
    """Rows on their way through an engine.

    Parameters
    ----------
    ask : callable
        Makes a row's prompt. What it raises is that row's outcome: skipped (`Skipped`) or failed.
    record : callable
        Gets each row's position and outcome once, in the order in which rows end.
    """

    def __init__(
        self,
        core: EngineCore,
        rows: Iterable[Row],
        ask: Callable[[Row], Ask],
        params: SamplingParams,
        record: Callable[[int, Outcome], None],
    ) -> None:
        self._core, self._ask, self._params, self._record = core, ask, params, record
        self._rows = enumerate(rows)
        self._window = WINDOW * core.config.scheduler_config.max_running
        self._live: dict[int, str] = {}
        self._inbox: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._interrupted = False

    def run(self) -> None:
        """Run to the end on this thread, touching no event loop.

        Ctrl-C, or Interrupt in a notebook, raises KeyboardInterrupt between two rows: what is with the engine is
        aborted and recorded first.
        """
        try:
            with on_interrupt(self._interrupt):
                while not self._interrupted:
                    started = self._start_next()
                    if not started and not self._live:
                        return
                    self._collect(block=not started)
            raise KeyboardInterrupt
        finally:
            self._abort()

    async def arun(self) -> None:
        """Run to the end on this event loop, which is never blocked. Cancelling aborts what is with the engine."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        self._wake = functools.partial(_tell, loop, news)
        held_since = time.monotonic()
        try:
            while (started := self._start_next()) or self._live:
                if not started:
                    await news.wait()
                    news.clear()
                elif time.monotonic() - held_since > LOOP_SHARE_S:
                    await asyncio.sleep(0)
                else:
                    continue
                held_since = time.monotonic()
                self._collect(block=False)
        finally:
            self._abort()

    def _start_next(self) -> bool:
        """Start one more row; False if there is no room, or no row."""
        if len(self._live) >= self._window:
            return False
        row = next(self._rows, None)
        if row is None:
            return False
        position, values = row
        try:
            ask = self._ask(values)
            self._live[position] = self._core.submit(
                ask.prompt,
                self._params,
                preview=ask.text,
                on_done=functools.partial(self._arrive, position),
            )
        except Skipped as skipped:
            self._record(position, Outcome("skipped", error=str(skipped)))
        except Exception as error:
            self._record(position, Outcome.failed(error))
        return True

    def _arrive(self, position: int, output: RequestOutput) -> None:
        # On the engine's thread, or an aborting one.
        self._inbox.put((position, output))
        if self._wake is not None:
            self._wake()

    def _collect(self, *, block: bool) -> None:
        """Record all that has arrived; with `block`, wait until something has."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get(block)
                block = False
                if item is not None:
                    position, output = item
                    del self._live[position]
                    self._record(position, Outcome.of(output))

    def _interrupt(self) -> None:
        self._interrupted = True
        self._inbox.put(None)

    def _abort(self) -> None:
        if self._live:
            for request_id in list(self._live.values()):
                self._core.abort(request_id)
            self._collect(block=False)


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(news.set)


def _line(error: Any) -> str | None:
    if error is None:
        return None
    text = " ".join(str(error).split())
    if isinstance(error, MlxNbError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
