"""The engine's one thread: it makes the backend, steps it, and is the only one to touch an array.

It never waits for an event loop: others post commands under a lock and listen for results; whatever they do,
stepping goes on.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..backends.base import (
    Backend,
    BackendFactory,
    CacheStats,
    Drafted,
    Ended,
    Event,
    Fault,
    Memory,
    Prefilled,
    Text,
    Token,
)
from ..backends.loader import leave_thread
from ..config import EngineConfig
from ..errors import EngineStopped, MlxNbError
from ..outputs import LoadProgress
from ..request import RequestStatus
from ..scheduler import Scheduler
from .answer import Answer, Wake, call_all
from .gil import BusyInterval
from .stats import Counters

__all__ = ["Worker"]

log = logging.getLogger("mlx_nb")
T = TypeVar("T")

MEMORY_READ_EVERY_S = 0.2
_WHOLE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
"""Answers that came to their own end: their KV state is worth keeping."""
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A thread from `start` to `stop`; made anew for each start.

    Attributes
    ----------
    state : {"loading", "running", "stopped", "failed"}
    failure : BaseException or None
        What made it "failed".
    backend : Backend or None
        None until loaded.
    memory, cache_stats, report
        As last read by the thread; safe to look at from any.
    admission : Lock
        No request begins to run while it is held.
    paused : bool
        Whether requests are left waiting.
    """

    def __init__(
        self,
        config: EngineConfig,
        factory: BackendFactory,
        counters: Counters,
        on_progress: Callable[[LoadProgress], None],
    ) -> None:
        self.state = "loading"
        self.failure: BaseException | None = None
        self.backend: Backend | None = None
        self.memory = Memory()
        self.cache_stats: CacheStats | None = None
        self.report: dict[str, dict[str, Any]] = {}
        self.counters = counters
        self.admission = threading.Lock()
        self.paused = False
        self._config = config
        self._factory: BackendFactory | None = factory
        self._on_progress = on_progress
        self._scheduler = Scheduler(config.scheduler_config)
        self._live: dict[str, Answer] = {}
        self._deadlines: list[tuple[float, int, Answer]] = []
        self._deadline_numbers = itertools.count()
        self._changed = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping: BaseException | None = None
        self._when_ready: list[Callable[[], None]] = []
        self._when_over: list[Callable[[], None]] = []
        self._memory_read = 0.0
        self._busy = False
        self._interval = BusyInterval()
        self._after: Worker | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)
        _workers.add(self)

    # -- any thread -------------------------------------------------------------------------------------

    def start(self, after: Worker | None = None) -> None:
        """Begin; the new thread first waits for the end of `after`, which must have been told to stop."""
        self._after = after
        self._thread.start()

    def submit(self, answer: Answer) -> None:
        """Queue a request; EngineStopped if it is too late for that."""
        self._post(lambda: self._admit(answer))

    def first(self) -> Answer | None:
        """The request that the thread has had longest; None if it has none. Its answer may have ended already."""
        return next(iter(list(self._live.values())), None)

    def discard(self, answer: Answer) -> None:
        """Drop the work for an answer that has ended."""
        with contextlib.suppress(EngineStopped):  # then its work ended with the thread
            self._post(lambda: self._drop(answer))

    def call(self, action: Callable[[Backend], T]) -> concurrent.futures.Future[T]:
        """Have `action(backend)` done on the engine thread, between two steps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.backend is None:
                    raise stopped_error(self)
                future.set_result(action(self.backend))
            except BaseException as error:  # the caller's to handle
                future.set_exception(error)
            self._read(now=True)

        self._post(run)
        return future

    def stop(self, reason: BaseException) -> None:
        """Tell the thread to end; `reason` goes to all live requests. Returns at once."""
        with self._changed:
            if self._stopping is None:
                self._stopping = reason
            self._changed.notify_all()
        self._wake()

    def _wake(self) -> None:
        if (backend := self.backend) is not None:
            backend.wake()

    def pause(self, paused: bool) -> None:
        """Start no more requests, or start them again; those that run go on."""

        def apply() -> None:
            self._scheduler.paused = paused

        self._post(apply)
        self.paused = paused

    @property
    def ending(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping is not None

    def when_ready(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once loading has ended, well or not."""
        self._when(self._when_ready, wake, lambda: self.state != "loading")

    def when_over(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once the thread is at its end."""
        self._when(self._when_over, wake, lambda: self.state in ("stopped", "failed"))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            if self._stopping is not None or self.state in ("stopped", "failed"):
                raise stopped_error(self)
            self._inbox.append(command)
            self._changed.notify_all()
        self._wake()

    def _when(
        self, wakes: list[Callable[[], None]], wake: Callable[[], None], over: Callable[[], bool]
    ) -> None:
        with self._changed:
            if not over():
                wakes.append(wake)
                return
        wake()

    # -- the thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        state, failure = "stopped", None
        try:
            if self._after is not None:
                self._after.join()
                self._after = None
            self._load()
            _stop_first()
            self._become("running")
            self._serve()
        except BaseException as error:
            if self.state == "running" and not isinstance(error, MlxNbError):  # that all who wait are told
                log.exception("mlx_nb: the engine thread failed")
            if error is not self._stopping:  # else loading was given up
                state, failure = "failed", _detached(error)
        self._end(state, failure)

    def _become(self, state: str) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
            wakes, self._when_ready = self._when_ready, []
            if state in ("stopped", "failed"):
                wakes += self._when_over
                self._when_over = []
        for wake in wakes:
            wake()

    def _load(self) -> None:
        assert self._factory is not None
        self.backend = self._factory(self._config, self._progress)
        self._scheduler = Scheduler(
            self._config.scheduler_config, self.backend.footprint, self.backend.kv_budget
        )
        self._scheduler.paused = self.paused
        self._read(now=True)

    def _progress(self, progress: LoadProgress) -> None:
        """Pass it on; or end loading here, a download above all, if nobody wants the model any more."""
        if self._stopping is not None:
            raise self._stopping
        self._on_progress(progress)

    def _unload(self) -> None:
        """Let the model go until the next command."""
        backend, self.backend = self.backend, None
        if backend is not None:
            backend.close()
        self.memory, self.cache_stats = Memory(limit=self.memory.limit), None

    def _serve(self) -> None:
        while self._wait():
            if self.backend is None:
                self._load()
            while self._commands:
                self._commands.popleft()()
            self._expire()
            if self._scheduler:
                self._step()

    def _wait(self) -> bool:
        """Take what there is to do into `_commands`; blocks while there is nothing. False when it is time to stop."""
        if self._busy and self._scheduler and not (self._inbox or self._stopping):
            return True  # what comes in this moment has its turn after the next step
        with self._changed:
            if not (self._inbox or self._scheduler or self._stopping):
                self._busy = False
                self._interval.leave()
                if not self._changed.wait_for(lambda: self._inbox or self._stopping, self._patience()):
                    if not self._live:
                        self._commands.append(self._unload)
                    return True
            self._busy = True
            self._interval.enter()
            if self._stopping is not None:
                return False
            self._commands += self._inbox
            self._inbox = []
            return True

    def _patience(self) -> float | None:
        """Seconds until something must be done though nothing happens: a request's time is up, or the model goes."""
        if self._live:  # paused
            return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None
        return None if self.backend is None else self._config.idle_unload_s

    def _expire(self) -> None:
        """End the requests whose time is up."""
        while self._deadlines and self._deadlines[0][0] <= time.monotonic():
            deadline, _, answer = heapq.heappop(self._deadlines)
            seconds = deadline - answer.request.arrival
            error = TimeoutError(f"the request was not finished within {seconds:g} s")
            if answer.finish(RequestStatus.FINISHED_ERROR, error):
                self._drop(answer)

    def _step(self) -> None:
        backend = self.backend
        assert backend is not None
        self._admit_and_preempt(backend)
        began = time.monotonic()
        prefilled = made = 0
        wakes: list[Wake] = []
        ended: dict[str, tuple[RequestStatus, BaseException | None]] = {}
        for event in self._events(backend):
            answer = self._live.get(event.request_id)
            if answer is None:
                continue
            match event:
                case Token() | Text() | Ended() if event.request_id in ended:
                    pass  # of the same step, after the one that ended the answer
                case Token() | Text() | Ended():
                    self._scheduler.grew(event.request_id)
                    made -= answer.length  # a token that only ends the answer doesn't count
                    if (end := _push(answer, event, wakes)) is not None:
                        ended[event.request_id] = end
                    made += answer.length
                case Prefilled():
                    prefilled += max(0, event.done - max(answer.prefilled, event.cached))
                    answer.progress(event.done, event.cached)
                    self._scheduler.prefilled(event.request_id, event.total - event.done)
                case Drafted():
                    answer.drafted(event.proposed, event.accepted)
                case Fault():
                    ended.setdefault(event.request_id, (RequestStatus.FINISHED_ERROR, event.error))
        self.counters.step(prefilled, made, time.monotonic() - began)
        if ended:
            self._finish(backend, ended)
        self._read(now=not self._scheduler)
        call_all(wakes)  # last, and all at once: a loop that wakes up takes the interpreter's lock

    def _admit_and_preempt(self, backend: Backend) -> None:
        preempted = self._scheduler.preempt()
        if preempted:
            for request in preempted:
                self._live[request.request_id].preempt()
            self._remove(backend, [request.request_id for request in preempted])
        admitted = [] if preempted else self._scheduler.schedule()
        backend.reserve(self._scheduler.kv_bytes())
        if not admitted:
            return
        answers = [self._live[request.request_id] for request in admitted]
        with self.admission:
            for answer in answers:
                answer.begin()
        self._insert_all(backend, answers)

    def _events(self, backend: Backend) -> list[Event]:
        """What a step brings; a step that fails is the fault of the requests in it, and of no others."""
        try:
            return backend.next()
        except Exception as error:
            spared = set(backend.reset())
            events: list[Event] = []
            for request_id in self._scheduler.running:
                if request_id in spared:
                    events += self._insert(backend, self._live[request_id])
                else:
                    events.append(Fault(request_id, error))
            return events

    def _insert(self, backend: Backend, answer: Answer) -> list[Fault]:
        try:
            backend.insert(answer.request, answer.made)
        except Exception as error:
            return [Fault(answer.request.request_id, error)]
        return []

    def _insert_all(self, backend: Backend, answers: Iterable[Answer]) -> None:
        for answer in answers:
            for fault in self._insert(backend, answer):
                self._fault(fault)

    def _remove(self, backend: Backend, request_ids: Sequence[str], *, keep: bool = False) -> None:
        """Drop rows that the scheduler runs no more; should that fail, the others begin again from where they are."""
        try:
            backend.remove(request_ids, keep=keep)
        except Exception:
            log.exception("mlx_nb: rows could not be dropped one by one; the batch is made anew")
            backend.reset()
            running = [answer for i in self._scheduler.running if (answer := self._live.get(i)) is not None]
            self._insert_all(backend, running)

    def _finish(self, backend: Backend, ended: dict[str, tuple[RequestStatus, BaseException | None]]) -> None:
        """Clear up after requests that ended, and only then tell: whoever hears of it finds all in order."""
        answers = {request_id: self._live.pop(request_id) for request_id in ended}
        whole = [i for i, (status, _) in ended.items() if status in _WHOLE and answers[i].request.keep]
        for request_id in ended:
            self._scheduler.remove(request_id)
            answer = answers[request_id]
            # A server tells only now how many it read.
            self.counters.prompt_total += answer.prompt_tokens - len(answer.request.prompt_token_ids)
        self._remove(backend, whole, keep=True)
        self._remove(backend, [i for i in ended if i not in whole])
        self.counters.processed += len(ended)
        if not self._scheduler:
            self._read(now=True)
        for request_id, (status, error) in ended.items():
            answers[request_id].finish(status, None if error is None else _detached(error))

    def _fault(self, fault: Fault) -> None:
        self._scheduler.remove(fault.request_id)
        answer = self._live.pop(fault.request_id, None)
        if answer is not None:
            self.counters.processed += 1
            answer.finish(RequestStatus.FINISHED_ERROR, _detached(fault.error))

    def _admit(self, answer: Answer) -> None:
        if answer.status.is_finished():  # aborted meanwhile, or nothing was asked for
            self.counters.processed += 1
        else:
            if (former := self._live.get(answer.request.request_id)) is not None:
                self._drop(former)  # aborted; its id is in use again before we were told to drop it
            self._live[answer.request.request_id] = answer
            self._scheduler.add(answer.request)
            if answer.request.deadline is not None:
                entry = (answer.request.deadline, next(self._deadline_numbers), answer)
                heapq.heappush(self._deadlines, entry)
                if len(self._deadlines) > 2 * len(self._live) + 64:  # most are of answers that have ended
                    self._deadlines = [e for e in self._deadlines if not e[2].status.is_finished()]
                    heapq.heapify(self._deadlines)
            self.counters.prompt_total += len(answer.request.prompt_token_ids)

    def _drop(self, answer: Answer) -> None:
        request_id = answer.request.request_id
        if self._live.get(request_id) is not answer:
            return
        del self._live[request_id]
        self.counters.processed += 1
        if self._scheduler.remove(request_id):
            assert self.backend is not None
            self._remove(self.backend, [request_id])
            self._read(now=True)

    def _read(self, *, now: bool) -> None:
        """Take the memory readings that other threads look at; a few times a second while busy."""
        clock = time.monotonic()
        if self.backend is not None and (now or clock - self._memory_read > MEMORY_READ_EVERY_S):
            self._memory_read = clock
            self.memory = self.backend.memory()
            self.cache_stats = self.backend.cache_stats()
            self.report = self.backend.report()

    def _end(self, state: str, failure: BaseException | None) -> None:
        with self._changed:
            self.failure = failure
            self._stopping = self._stopping or failure
            reason = failure or self._stopping
            self._commands += self._inbox
            self._inbox = []
        assert reason is not None
        # What was posted too late still gets an answer: admit it, so that it ends below; calls fail.
        while self._commands:
            self._commands.popleft()()
        for answer in self._live.values():
            answer.finish(RequestStatus.FINISHED_ERROR, reason)
        self._live.clear()
        self._scheduler.clear()
        self._deadlines.clear()
        self._factory = None
        try:
            self._unload()
        except Exception:
            log.exception("mlx_nb: closing the backend failed")
        _stop_first()
        leave_thread()  # also after a load that failed half-way
        self._interval.leave()
        self._become(state)


def _push(
    answer: Answer, event: Token | Text | Ended, wakes: list[Wake]
) -> tuple[RequestStatus, BaseException | None] | None:
    try:
        status = answer.push(event, wakes) if isinstance(event, Token) else answer.write(event, wakes)
    except Exception as error:  # its detokenizer's, say: this request's fault alone
        return RequestStatus.FINISHED_ERROR, error
    return None if status is None else (status, None)


def _detached(error: BaseException) -> BaseException:
    """The error with its traceback as a note.

    The frames themselves would keep arrays and the model alive for as long as somebody holds the error.
    """
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:  # an error may be its own cause
        seen.add(id(link))
        if link.__traceback__ is not None:
            link.add_note(
                "On the engine's thread:\n" + "".join(traceback.format_tb(link.__traceback__)).rstrip()
            )
            link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def stopped_error(worker: Worker) -> EngineStopped:
    """Why a worker takes nothing more."""
    if worker.failure is not None:
        error = EngineStopped(f"the engine failed ({worker.failure}); start it again")
        error.__cause__ = worker.failure
        return error
    return EngineStopped("the engine is stopped; start it again")


def _stop_first() -> None:
    """Have `_stop_all` come before what MLX registered when it was imported (last in, first out).

    MLX's own clean-up holds the interpreter lock and waits for one that a thread leaving MLX has: a deadlock.
    """
    atexit.unregister(_stop_all)
    atexit.register(_stop_all)


def _forked() -> None:
    """In a child process: the thread did not come along, and its locks may have been held."""
    for worker in list(_workers):
        worker._changed = threading.Condition()
        worker.failure = worker._stopping = EngineStopped(
            "this process was forked from the one that runs the engine, which can't follow: use threads, or start "
            "processes by the 'spawn' method, each with an engine of its own"
        )
        worker.state = "failed"


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    """End every engine thread before the interpreter does: one still inside MLX at exit crashes the process."""
    for worker in list(_workers):
        worker.stop(EngineStopped("the process is exiting"))
    for worker in list(_workers):
        worker.join(30)
