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
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from ..engine.core import EngineCore
from ..errors import EngineNotStarted, EngineStopped
from ..outputs import RequestOutput
from ..request import Chat
from ..sampling import SamplingParams
from .ahead import Ahead
from .interrupt import on_interrupt
from .keys import Keys, repeatable
from .outcome import Ask, Outcome, Skipped
from .sharing import Prefix, Work
from .snapshot import Recent, Snapshot, State, Tally
from .store import Store

__all__ = ["Ask", "Job", "Outcome", "Recent", "Skipped", "Snapshot", "State"]

WINDOW = 2
"""Rows with the engine, in batches: one that runs, and one that waits to take its place."""

TOGETHER = 64
"""Rows that are looked at together, at least, for what they share and what the checkpoint has of them."""

LOOK_S = 0.1
"""Seconds that an engine with room in its batch waits for rows to be read that are looked at together."""

MOST_WAITING = 64
"""Rows that may wait for one like them, times the window; reading stops there."""

LAST_S = 0.2
"""Seconds to wait for the outcome of a row that ended as the job did."""

LOOP_SHARE_S = 0.005
"""Seconds that an event loop is held at most while rows are being started."""

LOADING_S = 0.1
"""Seconds between two looks at an engine that loads its model again."""

_PREFILL = SamplingParams(max_tokens=1, temperature=0)

Row = TypeVar("Row")


class Job(Generic[Row]):
    """Rows on their way through an engine.

    A prompt that was asked before with the same parameters, greedy or seeded, isn't run again, unless it was aborted
    or its engine stopped. A restarted engine is waited for, so that only the rows it had in flight fail; if it stays
    stopped all others do, without being asked for.

    What rows have in common at their beginning is prefilled once and held in the prefix cache while they run; rows
    leave nothing else there.

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
        Gives back what was recorded at a position, for later rows that ask the same: about 140 bytes are kept for
        each row that ran. Without it only rows that run at the same time share an answer.
    store : Store, optional
        Has outcomes of earlier jobs, and gets this one's. Rows with logits processors are in none.
    retry_failed : bool
        Run rows again that the store knows as failed.
    share : bool
        Read rows ahead and look for what their prompts have in common. Not worth it for rows with images, of which
        no more are held than the engine is given.
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
        store: Store | None = None,
        retry_failed: bool = True,
        share: bool = True,
        total: int | None = None,
        label: Callable[[int], str] = str,
    ) -> None:
        self._core, self._ask, self._record, self._recall = core, ask, record, recall
        self._store, self._retry_failed = store, retry_failed
        self._rows = enumerate(rows)
        scheduler = core.config.scheduler_config
        self._window = WINDOW * scheduler.max_running
        self._finds_prefixes = scheduler.enable_prefix_cache
        self._together = max(TOGETHER, self._window) if share and (store or self._finds_prefixes) else 1
        self._keys = Keys(core.info.fingerprint)
        self._first: dict[bytes, int] = {}
        self._read: list[Work] = []
        self._read_since = 0.0
        self._read_all = False
        self._ahead = Ahead(core)
        self._live: dict[int, tuple[str, Work | Prefix]] = {}
        self._alike: dict[bytes, deque[tuple[int, str]]] = {}
        self._num_alike = 0
        self._prefix_numbers = itertools.count(-1, -1)
        self._inbox: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._tally = Tally(total, label)
        self._interrupted = self._stopped = self._paused = self._loading = False
        self._gone: Outcome | None = None

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
        return self._tally.snapshot(min(len(self._live), self._window // WINDOW))  # the others wait there

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
                    started = self._go_on()
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
                started = self._go_on()
                if not started and self._over():
                    return
                if not started:
                    await self._news(news)
                elif time.monotonic() - held_since > LOOP_SHARE_S:
                    await asyncio.sleep(0)
                else:
                    continue
                held_since = time.monotonic()
                self._collect(block=False)

    async def _news(self, news: asyncio.Event) -> None:
        if self._loading:  # which leaves no word when it is over
            await asyncio.sleep(LOADING_S)
        else:
            await news.wait()
            news.clear()

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
            self._ahead.close()
            if self._store is not None:
                self._store.flush()
            self._tally.turn(end)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._inbox.put(None)

    def _over(self) -> bool:
        return self._read_all and not (self._live or self._ahead or self._read)

    # -- rows in ----------------------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """Start a row or read one; False if there is no room, or nothing to do."""
        self._loading = self._core.state == "loading"  # it would hold this thread until it is loaded
        if self._loading or self._paused or len(self._live) >= self._window:
            return False
        item = self._ahead.pop()
        if item is None:
            return self._read_row()
        if isinstance(item, Prefix):
            self._start_prefix(item)
        else:
            self._start(item)
        return True

    def _read_row(self) -> bool:
        """Read a row, or pass on what was read; False if there is none, or too many wait already."""
        if len(self._ahead) >= self._together:
            return False
        if self._read and self._read_enough():
            read, self._read = self._read, []
            self._ahead.put(self._unknown(read))
            return True
        if self._read_all or self._num_alike >= MOST_WAITING * self._window:
            return False
        row = next(self._rows, None)
        if row is None:
            self._read_all = True
        else:
            if not self._read:
                self._read_since = time.monotonic()
            self._take_in(*row)
        return True

    def _read_enough(self) -> bool:
        """Whether the rows read are all that can be looked at together, or all that the engine may wait for."""
        return (
            len(self._read) >= self._together
            or self._read_all
            or self._num_alike >= MOST_WAITING * self._window
            or (WINDOW * len(self._live) < self._window and time.monotonic() - self._read_since > LOOK_S)
        )

    def _take_in(self, position: int, values: Row) -> None:
        if self._gone is not None and self._store is None and not self._core.is_running():
            self._end(position, "", self._gone)
            return
        try:
            ask = self._ask(values)
            same = repeatable(ask.params)
            key = self._keys.of(ask) if same or self._store is not None else None
        except Skipped as skipped:
            self._end(position, "", Outcome("skipped", error=str(skipped)))
            return
        except Exception as error:
            self._end(position, "", Outcome.failed(error))
            return
        if key is not None:
            if (alike := self._alike.get(key)) is not None:
                alike.append((position, ask.text))
                self._num_alike += 1
                return
            if (first := self._first.get(key)) is not None and self._recall is not None:
                self._end(position, ask.text, self._recall(first), reused=True)
                return
            self._alike[key] = deque()
        self._read.append(Work(position, ask, key, self._tokens(ask) if self._finds_prefixes else None))

    def _tokens(self, ask: Ask) -> list[int] | None:
        """A prompt's tokens; None if they can't be told, or don't tell all."""
        if ask.images or isinstance(ask.prompt, Chat):
            return None
        if not isinstance(ask.prompt, str):
            return list(ask.prompt)
        try:
            return self._core.codec.encode(ask.prompt)
        except Exception:  # submitting it says what is wrong
            return None

    def _unknown(self, works: list[Work]) -> list[Work]:
        """Those of the rows whose outcomes aren't in the store; the others end here."""
        if self._store is None:
            return works
        known = self._store.get_many([work.key for work in works if work.key is not None])
        unknown = []
        for work in works:
            outcome = known.get(work.key) if work.key is not None else None
            if outcome is None or (self._retry_failed and not outcome.answered):
                unknown.append(work)
            else:
                self._settle(work, outcome, reused=True)
        return unknown

    def _start(self, work: Work) -> None:
        ask, prefix = work.ask, work.prefix
        try:
            request_id = self._core.submit(
                work.prompt,
                ask.params,
                images=ask.images,
                prefix_boundary=prefix.length if prefix is not None else 0,
                preview=ask.text,
                keep=False,
                on_done=functools.partial(self._arrive, work.position),
            )
        except Exception as error:
            self._ahead.ended(work)
            outcome = Outcome.failed(error)
            if self._is_engines(error):
                self._gone = outcome
            self._settle(work, outcome, error)
        else:
            self._live[work.position] = (request_id, work)

    def _start_prefix(self, prefix: Prefix) -> None:
        number = next(self._prefix_numbers)
        try:
            request_id = self._core.submit(
                prefix.lead,
                _PREFILL,
                prefix_boundary=prefix.length,
                preview="what the next rows have in common",
                keep=False,
                on_done=functools.partial(self._arrive, number),
            )
        except Exception:  # the rows will say what is wrong
            self._ahead.stored(prefix)
        else:
            self._live[number] = (request_id, prefix)

    # -- outcomes out -----------------------------------------------------------------------------------

    def _arrive(self, number: int, output: RequestOutput) -> None:
        # On the engine's thread, or an aborting one.
        self._inbox.put((number, output))
        if self._wake is not None:
            self._wake()

    def _collect(self, *, block: bool) -> None:
        """Take all that has arrived; with `block`, wait until something has."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get(block, LOADING_S if self._loading else None)
                block = False
                if item is not None:
                    self._take(*item)

    def _take(self, number: int, output: RequestOutput) -> None:
        _, item = self._live.pop(number)
        if isinstance(item, Prefix):
            self._ahead.stored(item)
            return
        self._ahead.ended(item)
        outcome = Outcome.of(output)
        self._settle(item, outcome, output.error)

    def _settle(
        self, work: Work, outcome: Outcome, error: BaseException | None = None, *, reused: bool = False
    ) -> None:
        """Record the outcome of a row, and of those that wait for it; keep it in the store if it is new."""
        self._end(work.position, work.ask.text, outcome, reused=reused)
        if work.key is None:
            return
        if outcome.finish_reason == "abort" or self._is_engines(error):
            self._run_next(work)  # it says nothing of the row
            return
        if self._store is not None and not reused:
            self._store.put(work.key, outcome)
        if self._recall is not None and repeatable(work.ask.params):
            self._first[work.key] = work.position
        alike = self._alike.pop(work.key)
        self._num_alike -= len(alike)
        for position, text in alike:
            self._end(position, text, outcome, reused=True)

    def _is_engines(self, error: BaseException | None) -> bool:
        """Whether what ended a row ended its engine."""
        stopped = isinstance(error, EngineStopped | EngineNotStarted)
        return stopped or (error is not None and not self._core.is_running())

    def _run_next(self, work: Work) -> None:
        """Of the rows that waited for this one, let one run in its place."""
        assert work.key is not None
        if not (alike := self._alike[work.key]):
            del self._alike[work.key]
            return
        position, text = alike.popleft()
        self._num_alike -= 1
        if not self._read:
            self._read_since = time.monotonic()
        self._read.append(Work(position, replace(work.ask, text=text), work.key, work.tokens))

    def _end(self, position: int, text: str, outcome: Outcome, *, reused: bool = False) -> None:
        counted = self._record(position, outcome) or outcome
        self._tally.count(position, text, counted, reused=reused)

    def _abort(self) -> None:
        for request_id, _ in list(self._live.values()):
            self._core.abort(request_id)
        # One that ended by itself just now may be told of a little later.
        with contextlib.suppress(queue.Empty):
            while self._live:
                item = self._inbox.get(timeout=LAST_S)
                if item is not None:
                    self._take(*item)


def _tell(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(news.set)
