"""What runs in a worker process of a Dask cluster: its one engine, and the partitions that go through it.

Owns the engine's life there, and how a partition becomes outcomes. Starts nothing in the client's process; the other
end is dask_workers.py and dask_job.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from distributed import Reschedule, Worker, WorkerPlugin, get_worker

from ..backends import cpu_blas
from ..config import EngineConfig
from ..engine.async_core import AsyncEngineCore
from ..engine.core import EngineCore
from ..errors import EngineNotStarted, MlxNbError
from ..sampling import SamplingParams
from .generate import Call
from .job import Job, Snapshot
from .outcome import Outcome

__all__ = [
    "EnginePlugin",
    "Order",
    "Part",
    "Recipe",
    "command",
    "look",
    "ready",
    "run_part",
    "snapshots",
    "stats",
]

_LEFT = frozenset({"cancelled", "released", "forgotten"})
"""States of a task that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The engine that every worker process starts.

    Parameters
    ----------
    model : str
        Each worker loads it by this name, or from this path.
    config : EngineConfig, optional
        With `gpu_memory_utilization` already shared out.
    blas_threads : int, optional
        Threads of OpenBLAS on a CPU.
    """

    model: str
    config: EngineConfig | None = None
    adapter_path: str | None = None
    trust_remote_code: bool = False
    blas_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of all partitions of a job.

    Parameters
    ----------
    job : str
        The job's id.
    options : mapping
        Of `Call`.
    folder : str, optional
        Of the checkpoint: a file for each partition.
    framed : bool
        Whether a partition gives its frame, or the outcomes that one is made of elsewhere.
    """

    job: str
    template: str | None
    options: Mapping[str, Any]
    folder: str | None
    framed: bool

    def checkpoint(self, number: int) -> Path | None:
        """The file of a partition."""
        return None if self.folder is None else Path(self.folder, f"part-{number:05}.sqlite")


@dataclass(frozen=True, slots=True)
class Part:
    """A partition that has been through an engine.

    Attributes
    ----------
    outcomes : list of Outcome
        By position; empty if `frame` has them.
    structures : dict
        As of `Plan`.
    last : Snapshot
        Of its job.
    """

    last: Snapshot
    outcomes: list[Outcome] = field(default_factory=list)
    structures: dict[int, SamplingParams] = field(default_factory=dict)
    frame: pd.DataFrame | None = None


class _Process:
    """The engine of this process, whichever of its workers began it, and the jobs that use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.recipe: Recipe | None = None
        self._core: EngineCore | None = None
        self._failure: Exception | None = None
        self._users: set[str] = set()
        self._jobs: dict[tuple[str, int], Job[Any]] = {}
        self._keys: dict[Any, Job[Any]] = {}
        self._dropped: set[Any] = set()
        self._turned: dict[str, str] = {}
        self._begun: dict[str, set[int]] = {}

    def start(self, recipe: Recipe, user: str) -> None:
        """Launch the engine, unless a worker of this process has; what is wrong is told to whoever asks for it."""
        with self._lock:
            self._users.add(user)
            if self.recipe is not None:
                return
            self.recipe = recipe
            try:
                _share_cores(recipe.blas_threads)
                handle = AsyncEngineCore.from_pretrained(
                    recipe.model,
                    recipe.config,
                    adapter_path=recipe.adapter_path,
                    trust_remote_code=recipe.trust_remote_code,
                )
                handle.start()
                self._core = handle.engine
            except Exception as error:
                self._failure = error

    def leave(self, user: str) -> EngineCore | None:
        """Take note that a worker is done with the engine; gives it back if that was the last one."""
        with self._lock:
            self._users.discard(user)
            if self._users:
                return None
            core, self._core, self.recipe, self._failure = self._core, None, None, None
            return core

    def core(self) -> EngineCore:
        """The engine. Raises why there is none."""
        if self._failure is not None:
            raise self._failure
        if self._core is None:
            raise EngineNotStarted(
                "the worker has no engine: start one with mlx_nb.start_workers(client, MODEL)"
            )
        return self._core

    @contextlib.contextmanager
    def running(self, order: Order, number: int, key: Any, job: Job[Any]) -> Iterator[None]:
        """Have a partition's job seen, paused and stopped. Raises Reschedule if its task was given up meanwhile."""
        place = order.job, number
        with self._lock:
            self._jobs[place] = self._keys[key] = job
            self._begun.setdefault(order.job, set()).add(number)
            turned = self._turned.get(order.job)
        if turned is not None:
            getattr(job, turned)()
        try:
            yield
        finally:
            with self._lock:
                if self._jobs.get(place) is job:
                    del self._jobs[place]
                self._keys.pop(key, None)
                dropped = key in self._dropped
                self._dropped.discard(key)
        if dropped:
            raise Reschedule

    def drop(self, key: Any) -> None:
        """Stop the job of a task that nobody waits for any more."""
        with self._lock:
            job = self._keys.get(key)
            if job is None:
                return
            self._dropped.add(key)
        job.stop()

    def turn(self, job: str, command: str) -> list[int]:
        """Pause, resume or stop the partitions of a job, those to come as well; which have begun here."""
        with self._lock:
            self._turned[job] = command
            here = [its for (name, _), its in self._jobs.items() if name == job]
            begun = sorted(self._begun.get(job, ()))
        for its in here:
            getattr(its, command)()
        return begun

    def forget(self, job: str) -> None:
        """Take note that a job is over."""
        with self._lock:
            self._turned.pop(job, None)
            self._begun.pop(job, None)

    def snapshots(self, job: str) -> dict[int, Snapshot]:
        """How far the partitions are that are here."""
        with self._lock:
            here = [(number, its) for (name, number), its in self._jobs.items() if name == job]
        return {number: its.snapshot() for number, its in here}

    def order(self, action: str) -> None:
        """Call a method of the engine, if there is one."""
        if (core := self._core) is not None:
            getattr(core, action)()

    def stats(self) -> dict[str, Any] | None:
        """The engine's statistics, and the partitions that are here."""
        with self._lock:
            core, here = self._core, list(self._jobs.values())
        if core is None:
            return None
        info = core.info
        return {
            **core.get_stats(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "precision": info.precision,
            "backend": info.backend,
            "cache": core.get_cache_stats(),
            "failure": None if core.failure is None else str(core.failure),
            "partitions": [(each.done, each.total) for each in (job.snapshot() for job in here)],
        }


_process = _Process()


class EnginePlugin(WorkerPlugin):
    """Starts the engine with the worker, and stops it with it."""

    name = "mlx_nb"
    idempotent = True

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def setup(self, worker: Worker) -> None:
        """Launch the engine, which loads on its own thread: the worker's loop stays free."""
        _process.start(self.recipe, worker.address)

    async def teardown(self, worker: Worker) -> None:
        """Stop the engine."""
        core = _process.leave(worker.address)
        if core is not None:
            await core.stop()
            core.close()

    def transition(self, key: Any, start: str, finish: str, **_: Any) -> None:  # noqa: ARG002 - Dask gives them
        """Stop what nobody waits for: its client has cancelled it, or is gone."""
        if finish in _LEFT:
            _process.drop(key)


# -- for `client.run`: on the worker's event loop, so none of it blocks ---------------------------------------------


def look() -> tuple[Recipe | None, int]:
    """What the worker's process runs, and its id."""
    return _process.recipe, os.getpid()


async def ready() -> str | Exception:
    """Wait for the engine; its model's fingerprint, or why there is none."""
    try:
        core = _process.core()
        await core.ready()
    except Exception as error:
        return error if isinstance(error, MlxNbError) else MlxNbError(f"{type(error).__name__}: {error}")
    return core.info.fingerprint


def order_engine(action: str) -> None:
    """Have the engine do something that takes no time: pause, resume, abort_all, clear_prefix_cache_soon."""
    _process.order(action)


def command(job: str, action: str) -> list[int]:
    """Pause, resume or stop a job's partitions, or forget the job."""
    if action == "forget":
        _process.forget(job)
        return []
    return _process.turn(job, action)


def snapshots(job: str) -> dict[int, Snapshot]:
    """How far a job's partitions are."""
    return _process.snapshots(job)


def stats() -> dict[str, Any] | None:
    """What the engine says of itself, its model, state and failure, and the partitions it has; None without one."""
    return _process.stats()


# -- on the worker's threads ----------------------------------------------------------------------------------------


def run_part(data: pd.DataFrame | pd.Series, number: int, order: Order) -> Part:
    """Run the rows of a partition through the engine of this process."""
    core = _process.core()
    call = Call(
        data,
        order.template,
        engine=core,
        checkpoint=order.checkpoint(number),
        progress=False,
        **order.options,
    )
    core.wait_ready()
    call.check()
    with call.store() as store:
        results, job = call.job(store)
        with _process.running(order, number, get_worker().get_current_task(), job):
            job.run()
    if order.framed:
        return Part(job.snapshot(), frame=results.frame())
    return Part(job.snapshot(), [results.outcome(i) for i in range(call.answers)], call.structures)


def _share_cores(threads: int | None) -> None:
    """Dask lets OpenBLAS have one thread a worker, as its workers mostly run many tasks."""
    if threads is not None and cpu_blas.prepare().status == "loaded":
        cpu_blas.set_threads(threads)
