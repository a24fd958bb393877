"""The one loop that runs prompts over rows.

Rows are read when there is room for them: at most `WINDOW` times the engine's batch is with the engine, so that the
batch stays full and memory bounded however many rows there are. One thread (or one loop) reads rows, submits and
records; the engine's thread only puts results into an inbox, and other threads only leave word (pause, stop) or take
a snapshot. Knows nothing of DataFrames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from ..engine.core import EngineCore
from ..outputs import RequestOutput
from .interrupt import on_interrupt
from .keys import Keys, repeatable
from .outcome import Ask, Outcome, Skipped
from .snapshot import Recent, Snapshot, State, Tally

__all__ = ["Ask", "Job", "Outcome", "Recent", "Skipped", "Snapshot", "State"]

WINDOW = 2
"""Rows with the engine, in batches: one that runs, and one that waits to take its place."""

LOOP_SHARE_S = 0.005
"""Seconds that an event loop is held at most while rows are being started."""

MOST_WAITING = 64
"""Rows that may wait for one like them, times the window; reading stops there."""

Row = TypeVar("Row")


class Job(Generic[Row]):
    """Rows on their way through an engine.

    A prompt that was asked before with the same parameters, greedy or seeded, isn't run again.

    Parameters
    ----------
    core : EngineCore
        Loaded.
    rows : iterable
        Read as there is room for them; nothing of a row is kept.
    ask : callable
        Makes a row's prompt. What it raises is that row's outcome: skipped (`Skipped`) or failed.
    record : callable
        Gets each row's position and outcome once, in the order in which rows end, on the thread that runs the job.
        If it returns an outcome, that is what snapshots count and show.
    recall : callable, optional
        Gives back what was recorded at a position, for later rows that ask the same. Without it only rows that
        run at the same time share an answer.
    total : int, optional
        Rows there are, for snapshots.
    label : callable
        What the row at a position is called in snapshots.
    """

    def __init__(
        self,
        core: EngineCore,
        rows: Iterable[Row],
        ask: Callable[[Row], Ask],
        record: Callable[[int, Outcome], Outcome | None],
        *,
        recall: Callable[[int], Outcome] | None = None,
        total: int | None = None,
        label: Callable[[int], str] = str,
    ) -> None:
        self._core, self._ask, self._record, self._recall = core, ask, record, recall
        self._rows = enumerate(rows)
        self._window = WINDOW * core.config.scheduler_config.max_running
        self._keys = Keys(core.info.fingerprint)
        self._first: dict[bytes, int] = {}
        self._live: dict[int, tuple[str, str, bytes | None]] = {}
        self._waiting: dict[bytes, list[tuple[int, str]]] = {}
        self._num_waiting = 0
        self._inbox: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._tally = Tally(total, label)
        self._interrupted = self._stopped = self._paused = self._read_all = False

    # -- any thread -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more rows until `resume`; those with the engine run on."""
        self._paused = True
        self._tally.turn("paused")
        self._leave_word()

    def resume(self) -> None:
        """Undo `pause`."""
        self._paused = False
        self._tally.turn("running")
        self._leave_word()

    def stop(self) -> None:
        """Abort what is with the engine and have `run` or `arun` return; rows not yet started get no outcome."""
        self._stopped = True
        self._leave_word()

    def snapshot(self) -> Snapshot:
        """How far the job is."""
        return self._tally.snapshot(len(self._live))

    def _leave_word(self) -> None:
        self._inbox.put(None)
        if (wake := self._wake) is not None:
            wake()

    # -- the thread that runs it ------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end on this thread, touching no event loop.

        Ctrl-C, or Interrupt in a notebook, raises KeyboardInterrupt between two rows: what is with the engine is
        aborted and recorded first.
        """
        with self._running():
            with on_interrupt(self._interrupt):
                while not (self._interrupted or self._stopped):
                    started = self._start_next()
                    if not started and self._over():
                        return
                    self._collect(block=not started)
            if self._interrupted:
                raise KeyboardInterrupt

    async def arun(self) -> None:
        """Run to the end on this event loop, which is never blocked. Cancelling aborts what is with the engine."""
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        self._wake = functools.partial(_tell, loop, news)
        held_since = time.monotonic()
        with self._running():
            while not self._stopped:
                started = self._start_next()
                if not started and self._over():
                    return
                if not started:
                    await news.wait()
                    news.clear()
                elif time.monotonic() - held_since > LOOP_SHARE_S:
                    await asyncio.sleep(0)
                else:
                    continue
                held_since = time.monotonic()
                self._collect(block=False)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._tally.turn("paused" if self._paused else "running")
        end: State = "stopped"
        try:
            yield
            if not self._stopped:
                end = "finished"
        finally:
            self._abort()
            self._tally.turn(end)

    def _over(self) -> bool:
        return self._read_all and not self._live

    def _start_next(self) -> bool:
        """Start one more row; False if there is no room, or no row."""
        if (
            self._paused
            or len(self._live) >= self._window
            or self._num_waiting >= MOST_WAITING * self._window
        ):
            return False
        row = next(self._rows, None)
        if row is None:
            self._read_all = True
            return False
        position, values = row
        try:
            ask = self._ask(values)
            key = self._keys.of(ask) if repeatable(ask.params) else None
            if key is None or not self._shares(position, ask.text, key):
                self._submit(position, ask, key)
        except Skipped as skipped:
            self._end(position, "", Outcome("skipped", error=str(skipped)))
        except Exception as error:
            self._end(position, "", Outcome.failed(error))
        return True

    def _submit(self, position: int, ask: Ask, key: bytes | None) -> None:
        request_id = self._core.submit(
            ask.prompt,
            ask.params,
            images=ask.images,
            preview=ask.text,
            on_done=functools.partial(self._arrive, position),
        )
        self._live[position] = (request_id, ask.text, key)
        if key is not None:
            self._waiting[key] = []

    def _shares(self, position: int, text: str, key: bytes) -> bool:
        """Whether the row has its answer from another, now or once that one ends."""
        if (waiting := self._waiting.get(key)) is not None:
            waiting.append((position, text))
            self._num_waiting += 1
            return True
        if self._recall is not None and (first := self._first.get(key)) is not None:
            self._end(position, text, self._recall(first), reused=True)
            return True
        return False

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
                    self._take(*item)

    def _take(self, position: int, output: RequestOutput) -> None:
        _, text, key = self._live.pop(position)
        outcome = Outcome.of(output)
        self._end(position, text, outcome)
        if key is None:
            return
        if self._recall is not None and outcome.finish_reason != "abort":
            self._first[key] = position
        waiting = self._waiting.pop(key)
        self._num_waiting -= len(waiting)
        for other, its_text in waiting:
            self._end(other, its_text, outcome, reused=True)

    def _end(self, position: int, text: str, outcome: Outcome, *, reused: bool = False) -> None:
        counted = self._record(position, outcome) or outcome
        self._tally.count(position, text, counted, reused=reused)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._inbox.put(None)

    def _abort(self) -> None:
        if self._live:
            for request_id, _, _ in list(self._live.values()):
                self._core.abort(request_id)
            self._collect(block=False)


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(news.set)
