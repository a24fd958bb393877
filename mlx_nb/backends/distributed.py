"""One model over several processes, which mlx's launcher has started: the first leads, the others do as it does.

Every process holds a part of the model (mlx-lm shards it) and a batch of its own; they compute each step together.
The leader has the engine; what it does to its batch is told to the others over a connection, and they do the same.
Nothing that a step depends on may differ between them: neither time (prefill chunks have a fixed size) nor chance
(rows are drawn by their seeds). Knows nothing of engines or notebooks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import secrets
import socket
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import EngineStopped, MlxNbError, ModelLoadError, RequestError
from ..outputs import LoadProgress
from ..request import Request
from . import cpu_blas, sources
from .base import Backend, CacheStats, Event, Memory, Token

__all__ = ["HINT", "Distributed", "follow", "meet", "rank_and_size"]

HINT = (
    "a model over several processes needs a kernel or a script that mlx.launch started: "
    "python -m mlx_nb kernel -n 2 --install parts makes a kernel for Jupyter, "
    "and a script goes by mlx.launch -n 2 -- python script.py"
)
CHUNK = 256
"""Tokens of a prefill chunk at most: the same everywhere, so none that follows the clock."""
FAULT_S = 10.0
"""Seconds in which the leader must have failed as well, if a step fails elsewhere."""
_ADDRESS_BYTES = 512
_LOST = (
    "a process of the model has ended, so it can't go on: restart the kernel, and start the engine again "
    "(the launcher's output says more)"
)

log = logging.getLogger("mlx_nb")


@functools.cache
def rank_and_size() -> tuple[int, int]:
    """Which this process is among those that were launched together; (0, 1) for one alone."""
    cpu_blas.prepare()
    import mlx.core as mx

    group = mx.distributed.init()
    return group.rank(), group.size()


@dataclass(frozen=True, slots=True)
class _Order:
    """A model that all processes are to load."""

    model: str
    trust_remote_code: bool
    config: EngineConfig


class Distributed:
    """A `BackendFactory` for a model of which each process holds a part.

    Parameters
    ----------
    model : str
        Hub id, folder or alias, the same for all processes. It is cut through its layers if mlx-lm can do that,
        or else between them.

    Raises
    ------
    RequestError
        In a process that was not launched with others.
    UnknownModelError
        For a name that is no model.
    """

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        rank, size = rank_and_size()
        if size == 1:
            raise RequestError(HINT)
        if rank:
            raise RequestError(
                f"this is process {rank} of {size}: the engine is the first one's, call follow() here"
            )
        self._source = sources.resolve(model)
        self._model, self._trust = model, trust_remote_code

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self._source.name

    def __call__(self, config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> Backend:
        """Load this process's part while the others load theirs."""
        others = _others()
        order = _Order(self._model, self._trust, _steady(config))
        others.tell([("load", (order,), {})])
        failure: MlxNbError | None = None
        path = None
        try:
            path = sources.fetch(self._source, on_progress)
        except MlxNbError as error:
            failure = error
        said = others.hear()
        missing = [(number + 1, what) for number, what in enumerate(said) if what is not None]
        others.tell([("go", (failure is None and not missing,), {})])
        if failure is not None:
            raise failure
        if missing:
            rank, what = missing[0]
            raise ModelLoadError(f"process {rank} can't have {self.name}: {what}")
        assert path is not None
        on_progress(LoadProgress("load", f"Loading a part of {self.name}", None))
        with others.watched():
            backend = _load(path, order, self.name)
        on_progress(LoadProgress("ready", f"{self.name} is loaded, over {others.size + 1} processes", 1.0))
        return _Leader(backend, others)


def _steady(config: EngineConfig) -> EngineConfig:
    scheduler = config.scheduler_config
    return replace(
        config,
        idle_unload_s=None,
        scheduler_config=replace(scheduler, prefill_step_size=min(CHUNK, scheduler.prefill_step_size)),
    )


def _load(path: Path, order: _Order, name: str) -> Any:
    """The part of the model that this process has, in a batch."""
    from mlx_lm.utils import sharded_load

    from .loader import settle
    from .steady import SteadyBatch

    try:
        model, tokenizer = sharded_load(str(path), trust_remote_code=order.trust_remote_code)
    except (ValueError, OSError) as error:  # of the model itself, so the same in all processes
        raise ModelLoadError(f"{name} can't be divided: {' '.join(str(error).split())}") from error
    settle(model)
    config = replace(order.config, model_name=order.config.model_name or name)
    if not hasattr(model, "shard"):
        # Each process has other layers, so their stored prefixes differ in size, and would not be evicted alike.
        config = replace(config, scheduler_config=replace(config.scheduler_config, enable_prefix_cache=False))
    backend = SteadyBatch(model, tokenizer, config)
    backend.info = replace(backend.info, notes=(f"over {rank_and_size()[1]} processes",))
    return backend


# -- the leader -----------------------------------------------------------------------------------------------------

Message = list[tuple[str, tuple[Any, ...], dict[str, Any]]]
"""What to do, in order: name, arguments."""


class _Others:
    """The connections to the processes that follow."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self.lost = False

    @property
    def size(self) -> int:
        """How many follow."""
        return len(self._connections)

    def tell(self, message: Message) -> None:
        """Send it to all. Raises EngineStopped if one is gone."""
        data = pickle.dumps(message)
        with self.watched():
            for connection in self._connections:
                connection.send_bytes(data)

    def hear(self) -> list[Any]:
        """What each answers."""
        with self.watched():
            return [connection.recv() for connection in self._connections]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell the loss of a process from other faults."""
        if self.lost:
            raise EngineStopped(_LOST)
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "peer was lost" not in str(error):
                raise
            self.lost = True
            raise EngineStopped(_LOST) from error


def meet() -> None:
    """Connect to the processes that follow, before there is an engine: they wait for it better so."""
    if rank_and_size()[1] > 1:
        _others()


@functools.cache
def _others() -> _Others:
    """Meet the other processes; they do the same in `_leader`."""
    _, size = rank_and_size()
    key = secrets.token_bytes(32)
    listener = Listener((_host(), 0), backlog=size, authkey=key)
    _broadcast(json.dumps([*listener.address, key.hex()]).encode())
    connections = [listener.accept() for _ in range(size - 1)]
    listener.close()
    connections.sort(key=lambda connection: connection.recv())
    return _Others(connections)


def _leader() -> Connection:
    """Meet the first process."""
    host, port, key = json.loads(_broadcast(b""))
    connection = Client((host, port), authkey=bytes.fromhex(key))
    connection.send(rank_and_size()[0])
    return connection


def _broadcast(data: bytes) -> bytes:
    """What the first process gives, everywhere."""
    import mlx.core as mx

    padded = mx.array(list(data.ljust(_ADDRESS_BYTES, b"\0")), dtype=mx.uint8)
    summed = mx.distributed.all_sum(padded, stream=mx.cpu)
    return bytes(summed.tolist()).rstrip(b"\0")  # type: ignore[arg-type]


def _host() -> str:
    """Where the others reach this process: what the ring was told, or the name of the machine."""
    with contextlib.suppress(KeyError, OSError, ValueError, IndexError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text(encoding="utf-8"))
        return str(hosts[0][0]).rpartition(":")[0]
    return socket.gethostname()


class _Leader:
    """The leader's batch: what is done to it, all others do as well."""

    def __init__(self, backend: Any, others: _Others) -> None:
        self._backend, self._others = backend, others
        self.codec, self.info = backend.codec, backend.info
        self.footprint, self.kv_budget = backend.footprint, backend.kv_budget
        self.check = functools.partial(_check, backend.check)
        self._waiting: Message = []
        self._reserved: int | None = None
        self._made = 0

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """See `Backend.insert`."""
        self._both("insert", _portable(request), list(made))

    def reserve(self, kv_bytes: int) -> None:
        """See `Backend.reserve`; the others hear of it with the next step."""
        if kv_bytes != self._reserved:
            self._reserved = kv_bytes
            self._waiting.append(("reserve", (kv_bytes,), {}))
            self._backend.reserve(kv_bytes)

    def hold_prefix(self, tokens: Sequence[int], *, held: bool) -> None:
        """See `Backend.hold_prefix`."""
        self._both("hold_prefix", list(tokens), held=held)

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """See `Backend.remove`."""
        if request_ids:
            self._both("remove", list(request_ids), keep=keep)

    def next(self) -> list[Event]:
        """See `Backend.next`."""
        self._tell("next", self._made)
        with self._others.watched():
            events: list[Event] = self._backend.next()
        self._made = _digest(events)
        return events

    def wake(self) -> None:
        """A step waits for nothing."""

    def reset(self) -> list[str]:
        """See `Backend.reset`. Raises EngineStopped if a process is gone: then nothing can go on."""
        self._made = 0
        spared: list[str] = self._both("reset")
        return spared

    def warm_up(self) -> None:
        """See `Backend.warm_up`."""
        self._both("warm_up")

    def memory(self) -> Memory:
        """That of this process."""
        memory: Memory = self._backend.memory()
        return memory

    def report(self) -> dict[str, dict[str, Any]]:
        """How many processes there are."""
        return {"distributed": {"rank": 0, "processes": self._others.size + 1}}

    def cache_stats(self) -> CacheStats | None:
        """Those of this process, and so of all."""
        stats: CacheStats | None = self._backend.cache_stats()
        return stats

    def clear_prefix_cache(self) -> None:
        """See `Backend.clear_prefix_cache`."""
        self._both("clear_prefix_cache")

    def clear_runtime_caches(self) -> dict[str, Any]:
        """See `Backend.clear_runtime_caches`; what was freed here."""
        freed: dict[str, Any] = self._both("clear_runtime_caches")
        return freed

    def save_cache(self, folder: Path) -> bool:  # noqa: ARG002 - the protocol has it
        """Refused: each process has a part of the states only."""
        raise RequestError(
            "the prefix cache of a model over several processes can't be saved: each has a part of it"
        )

    def load_cache(self, folder: Path) -> int:  # noqa: ARG002 - the protocol has it
        """Refused, as `save_cache`."""
        raise RequestError(
            "a saved prefix cache is of a whole model: it can't be loaded over several processes"
        )

    def close(self) -> None:
        """Have all let go of the model."""
        with contextlib.suppress(EngineStopped):
            self._tell("close")
        self._backend.close()

    def _both(self, name: str, *arguments: Any, **options: Any) -> Any:
        self._tell(name, *arguments, **options)
        with self._others.watched():
            return getattr(self._backend, name)(*arguments, **options)

    def _tell(self, name: str, *arguments: Any, **options: Any) -> None:
        message, self._waiting = [*self._waiting, (name, arguments, options)], []
        self._others.tell(message)


def _check(check: Callable[[Request], None], request: Request) -> None:
    check(request)
    if request.params.logits_processors:
        raise RequestError(
            "logits processors run in one process only: leave them out, or the model in one process"
        )


def _portable(request: Request) -> Request:
    """The request as other processes can read it: a model class of the notebook's is unknown there."""
    params = request.params
    return (
        request if params.schema is None else replace(request, params=params.but(schema=params.json_schema))
    )


def _digest(events: Sequence[Event]) -> int:
    """What a step made, so that others can tell whether they made the same."""
    tokens = [(event.request_id, event.token_id) for event in events if isinstance(event, Token)]
    return zlib.crc32(repr(tokens).encode())


# -- the others -----------------------------------------------------------------------------------------------------


def follow() -> None:
    """In all processes but the first: do as that one does until it ends, then leave. In the first: return at once.

    Raises
    ------
    SystemExit
        At the end: status 0 if the first process has ended, 1 after a fault.
    """
    rank, size = rank_and_size()
    if rank == 0:
        return
    follower = _Follower(_leader())
    try:
        follower.run()
    except (EOFError, OSError):  # the first process has ended
        _leave(0)
    except BaseException as error:
        print(f"mlx_nb: process {rank} of {size} ends: {_line(error)}", file=sys.stderr, flush=True)  # noqa: T201
        _leave(1)


class _Follower:
    """Does to its batch what the leader does to its own."""

    def __init__(self, leader: Connection) -> None:
        self._leader = leader
        self._backend: Any = None
        self._made = 0

    def run(self) -> None:
        """Until the leader is gone."""
        while True:
            for name, arguments, options in pickle.loads(self._leader.recv_bytes()):
                if name == "load":
                    self._load(*arguments)
                elif name == "next":
                    self._step(*arguments)
                elif self._backend is not None:
                    self._do(name, arguments, options)

    def _load(self, order: _Order) -> None:
        source, what, path = None, None, None
        try:
            source = sources.resolve(order.model)
            path = sources.fetch(source, lambda _: None)
        except MlxNbError as error:
            what = _line(error)
        self._leader.send(what)
        ((_, (go,), _),) = pickle.loads(self._leader.recv_bytes())
        if go and source is not None and path is not None:
            with contextlib.suppress(ModelLoadError):  # the leader says it
                self._backend = _load(path, order, source.name)

    def _step(self, made: int) -> None:
        if made != self._made:
            raise MlxNbError("it made other tokens than the first: the machines must be alike")
        try:
            self._made = _digest(self._backend.next())
        except Exception:
            # If it is a fault of the request, the leader had it as well and begins again.
            if not self._leader.poll(FAULT_S):
                raise
            message = pickle.loads(self._leader.recv_bytes())
            if message[-1][0] not in ("reset", "close"):
                raise
            for name, arguments, options in message:
                self._do(name, arguments, options)

    def _do(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if name == "reset":
            self._made = 0
        try:
            getattr(self._backend, name)(*arguments, **options)
        except Exception:
            log.debug("mlx_nb: %s failed, as it did for the first process", name, exc_info=True)
        if name == "close":
            self._backend, self._made = None, 0


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _leave(status: int) -> None:
    """End without waiting for what the ring still holds."""
    sys.stdout.flush()
    os._exit(status)
