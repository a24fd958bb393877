"""The loop that runs partitions on a cluster's workers, with the face of a job: run, pause, resume, stop, snapshot.

One thread submits partitions and takes what they give; Dask places them, and does those of a lost worker again. How
far they are is asked for only while somebody looks. Knows nothing of prompts.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ..errors import MlxNbError
from .interrupt import on_interrupt
from .snapshot import RECENT, Recent, Snapshot, State

__all__ = ["ClusterJob", "Poll"]

AHEAD = 2
"""Partitions with the cluster, for each worker: one that runs, and one that fills the engine's batch as that ends."""

LOOK_S = 0.5
"""Seconds between two looks at the workers."""
UNWATCHED_S = 3.0
"""Seconds without a reader after which a poll rests."""
LAST_S = 10.0
"""Seconds to wait for what stopped partitions have."""

T = TypeVar("T")


class ClusterJob:
    """Partitions on their way through the engines of a cluster.

    Parameters
    ----------
    client : distributed.Client
    count : int
        Partitions.
    submit : callable
        Gives the future of a partition's `Part`.
    record : callable
        Gets the number of each partition that is done and its future, on the thread that runs the job; gives its last
        snapshot.
    total : int, optional
        Rows there are, if known.
    name : str
        What the workers call it.
    together : bool
        Hand over all partitions at once, for Dask to see to, and not as there is room for them.
    """

    def __init__(
        self,
        client: Any,
        count: int,
        submit: Callable[[int], Any],
        record: Callable[[int, Any], Snapshot],
        *,
        total: int | None,
        name: str,
        together: bool = False,
    ) -> None:
        from .dask_worker import snapshots

        self.name = name
        self._client, self._count, self._submit, self._record = client, count, submit, record
        self._total, self._together = total, together
        self._room = AHEAD
        self._inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._live: dict[int, Any] = {}
        self._next = 0
        self._ended: dict[int, Snapshot] = {}
        self._poll: Poll[Mapping[int, Snapshot]] = Poll(client, snapshots, name)
        self._state: State = "new"
        self._began = self._over = 0.0
        self._stopped = self._interrupted = self._paused = False
        self._words: list[str] = []

    # -- any thread -------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no more rows until `resume`."""
        self._paused = True
        self._say("pause")

    def resume(self) -> None:
        """Undo `pause`."""
        self._paused = False
        self._say("resume")

    def stop(self) -> None:
        """Abort what the engines have, and have `run` return."""
        self._stopped = True
        self._inbox.put(None)

    def snapshot(self) -> Snapshot:
        """How far the job is: the partitions that are done, and the others as they were a moment ago."""
        ended = dict(self._ended)
        live = {
            number: one
            for here in self._poll.latest().values()
            for number, one in here.items()
            if number not in ended
        }
        if self._state in ("stopped", "finished"):
            live = {}
        return self._sum([*ended.values()], [*live.values()])

    def _say(self, word: str) -> None:
        self._words.append(word)
        self._inbox.put(None)

    # -- the thread that runs it ------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end on this thread.

        Raises KeyboardInterrupt on Ctrl-C or Interrupt, once what there is has been recorded.
        """
        self._state, self._began = "running", time.monotonic()
        end: State = "stopped"
        try:
            with on_interrupt(self._interrupt):
                while not self._stopped and (self._live or self._next < self._count):
                    self._fill()
                    self._take(self._inbox.get())
                if self._stopped:
                    self._wind_up()
                else:
                    end = "finished"
            if self._interrupted:
                raise KeyboardInterrupt
        finally:
            self._poll.close()
            self._tell("forget")
            self._client.cancel([*self._live.values()], force=True) if self._live else None
            self._over = time.monotonic()
            self._state = end

    def _interrupt(self) -> None:
        self._interrupted = True
        self.stop()

    def _fill(self) -> None:
        """Hand over partitions as there is room for them."""
        while self._words:
            self._tell(self._words.pop(0))
        if self._together:
            self._room = self._count
        else:
            with contextlib.suppress(Exception):  # a scheduler that is gone is told of by the futures
                self._room = AHEAD * max(1, len(self._client.ncores()))
        while self._next < self._count and len(self._live) < self._room:
            if self._paused and not self._together:
                return
            number = self._next
            self._next += 1
            future = self._live[number] = self._submit(number)
            future.add_done_callback(functools.partial(self._done, number))

    def _done(self, number: int, _: Any) -> None:
        self._inbox.put(number)

    def _take(self, number: int | None) -> None:
        if number is None or number not in self._live:
            return
        future = self._live[number]
        status = future.status
        if status == "finished":
            self._ended[number] = self._record(number, future)
            del self._live[number]
        elif status == "error":
            raise _readable(number, future.exception())
        elif status == "cancelled":
            raise MlxNbError(
                "the cluster's scheduler is gone: start the cluster again and run the same call; "
                "a checkpoint has what is finished"
            )
        else:  # it was lost again, and is done once more
            future.add_done_callback(functools.partial(self._done, number))

    def _wind_up(self) -> None:
        """Stop the partitions that run, and take what they have."""
        self._next = self._count
        begun = {
            number for here in self._tell("stop").values() for number in here
        }  # and perhaps done just now
        waiting = [self._live.pop(number) for number in [*self._live] if number not in begun]
        if waiting:
            self._client.cancel(waiting, force=True)
        until = time.monotonic() + LAST_S
        with contextlib.suppress(queue.Empty):
            while self._live:
                self._take(self._inbox.get(timeout=max(0.0, until - time.monotonic())))

    def _tell(self, word: str) -> dict[str, list[int]]:
        from .dask_worker import command

        try:
            return self._client.run(command, self.name, word, on_error="ignore") or {}
        except Exception:  # the scheduler may be gone, which the futures tell
            return {}

    # -- what is shown ----------------------------------------------------------------------------------

    def _sum(self, ended: list[Snapshot], live: list[Snapshot]) -> Snapshot:
        both = [*ended, *live]
        now = self._over or time.monotonic()
        elapsed = 0.0 if self._state == "new" else now - self._began
        done = sum(one.done for one in both)
        if self._over and elapsed:
            rows, tokens = (
                done / elapsed,
                sum(one.tokens_per_second * one.elapsed_s for one in both) / elapsed,
            )
        else:
            rows, tokens = (
                sum(one.rows_per_second for one in live),
                sum(one.tokens_per_second for one in live),
            )
        total = self._total
        if total is None and len(both) == self._count:
            total = sum(one.total or 0 for one in both)
        left = None if total is None else max(0, total - done)
        state = "paused" if self._paused and self._state == "running" else self._state
        return Snapshot(
            state=state,
            total=total,
            done=done,
            failed=sum(one.failed for one in both),
            skipped=sum(one.skipped for one in both),
            truncated=sum(one.truncated for one in both),
            reused=sum(one.reused for one in both),
            running=sum(one.running for one in live),
            rows_per_second=rows,
            tokens_per_second=tokens,
            elapsed_s=elapsed,
            left_s=0.0 if left == 0 else left / rows if left is not None and rows > 0 else None,
            recent=_latest(live or ended[-1:]),
        )


def _latest(snapshots: list[Snapshot]) -> tuple[Recent, ...]:
    """The last results of several, by turns."""
    turns = [one.recent[i] for i in range(RECENT) for one in snapshots if i < len(one.recent)]
    return tuple(turns[:RECENT])


def _readable(number: int, error: BaseException) -> BaseException:
    """What ended a partition, in one line where it says enough."""
    if isinstance(error, MlxNbError):
        return error
    if type(error).__name__ == "KilledWorker":
        return MlxNbError(
            f"partition {number} was given up, as the workers that ran it died one after the other: see their logs, "
            "and give them more memory or make partitions smaller (partitions=…)"
        )
    return error


class Poll(Generic[T]):
    """Asks all workers the same thing every so often, from a thread, while somebody reads what they say."""

    def __init__(self, client: Any, function: Callable[..., T], *arguments: Any) -> None:
        self._client, self._function, self._arguments = client, function, arguments
        self._lock = threading.Lock()
        self._said: dict[str, T] | None = None
        self._read = 0.0
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def latest(self) -> dict[str, T]:
        """What they said last, by address; those that said nothing are left out. The first time it asks itself."""
        if self._said is None and not self._closed.is_set():
            self._ask()
        with self._lock:
            self._read = time.monotonic()
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._go_on, name="mlx_nb workers", daemon=True)
                self._thread.start()
            return self._said or {}

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _go_on(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                if time.monotonic() - self._read > UNWATCHED_S:
                    self._thread = None
                    return
            self._ask()
            self._closed.wait(LOOK_S)

    def _ask(self) -> None:
        try:
            self._said = self._client.run(self._function, *self._arguments, on_error="ignore") or {}
        except Exception:  # the scheduler may be away for a moment
            self._said = {}


def new_name() -> str:
    """What a job is called among the workers."""
    return f"mlx_nb-{uuid.uuid4().hex[:12]}"
