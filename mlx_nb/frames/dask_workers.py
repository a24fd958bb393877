"""The engines of a Dask cluster, from the client's side: starting them, and what they say of themselves.

Owns what is asked of all workers at once. One engine runs in each worker process; what it does there is
dask_worker.py's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.base import ModelInfo
from ..config import EngineConfig
from ..errors import EngineNotStarted, MlxNbError, ModelLoadError, RequestError
from ..session.api import config_of
from ..session.session import default_session
from .dask_job import Poll

if TYPE_CHECKING:
    from ..widgets.monitor import MonitorWidget

__all__ = ["Workers", "check_client", "client_in_use", "start_workers"]


def start_workers(
    client: Any,
    model: str | Path | None = None,
    *,
    config: EngineConfig | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Workers:
    """Start an engine in every worker process of a Dask cluster, in those to come as well; return once all are ready.

    The share of memory that an engine may use, and the cores, are divided by the engines of a machine.

    Parameters
    ----------
    client : distributed.Client
        A synchronous one.
    model : str or Path, optional
        Hub id, folder, ``.gguf`` file, alias or "demo"; every worker loads it by itself. The model that runs in this
        process, if none is given. Workers that run it already are left as they are.
    config, adapter_path, trust_remote_code, **options
        As of `mlx_nb.start`.

    Raises
    ------
    ModelLoadError
        If a worker can't load the model; then none keeps an engine.
    RequestError
        If the workers run another model or run it with other options, or there are no workers.
    """
    check_client(client)
    found = _look(client)
    running = {recipe.model for recipe, _ in found.values() if recipe is not None}
    name = _named(model, running)
    others = running - {name}
    if others:
        raise RequestError(
            f"the workers run {', '.join(sorted(others))}: stop them first (mlx_nb.start_workers(client).stop()), "
            "or leave the model out"
        )
    from .dask_worker import EnginePlugin, Recipe

    recipe = Recipe(name, config_of(config, options), _absolute(adapter_path), trust_remote_code)
    if not running:
        client.register_plugin(EnginePlugin(_shared(recipe, found)))
    elif recipe != Recipe(name):  # something is asked for beyond the model
        wanted = _shared(recipe, found)
        if any(had is not None and had != wanted for had, _ in found.values()):
            raise RequestError(
                f"the workers run {name} with other options: stop them first "
                "(mlx_nb.start_workers(client).stop()), or leave the options out"
            )
    workers = Workers(client, name)
    try:
        workers.check()
    except MlxNbError:
        if not running:
            workers.stop()
        raise
    return workers


class Workers:
    """The engines of a cluster. Made by `start_workers`; in a notebook its display is a monitor, a row a worker.

    Attributes
    ----------
    client : distributed.Client
    model_name : str
        What they run.
    """

    def __init__(self, client: Any, model: str) -> None:
        from .dask_worker import stats

        self.client, self.model_name = client, model
        self._poll: Poll[dict[str, Any] | None] = Poll(client, stats)

    def check(self) -> None:
        """Wait until all are ready; ModelLoadError if one can't be."""
        from .dask_worker import ready

        said: Mapping[str, str | Exception] = self.client.run(ready, on_error="return")
        failed = {address: what for address, what in said.items() if isinstance(what, Exception)}
        if failed:
            address, why = next(iter(failed.items()))
            more = f" ({len(failed)} of {len(said)} workers can't)" if len(said) > 1 else ""
            raise ModelLoadError(f"worker {address} can't run {self.model_name}: {why}{more}")
        if len(set(said.values())) > 1:
            raise ModelLoadError(
                f"the workers don't have the same {self.model_name}: bring it to the same version on all"
            )

    def stats(self) -> dict[str, dict[str, Any]]:
        """The statistics of each worker's engine, by the worker's address; as `EngineCore.get_stats`, and more."""
        from .dask_worker import stats

        check_client(self.client)
        return _engines(self.client.run(stats, on_error="ignore"))

    def stop(self) -> None:
        """Stop the engines, and start none in workers to come."""
        from .dask_worker import EnginePlugin

        check_client(self.client)
        self.client.unregister_worker_plugin(EnginePlugin.name)

    def monitor(self) -> MonitorWidget:
        """A live view of all engines together, and of each worker in a row."""
        from ..widgets import MonitorWidget

        return MonitorWidget(self)

    def __repr__(self) -> str:
        return f"<workers of {self.client.scheduler.address}: {self.model_name}>"

    def _ipython_display_(self, **kwargs: Any) -> None:
        self._shown = self.monitor()
        self._shown._ipython_display_(**kwargs)

    # -- what a monitor needs: of a moment ago, so that it never waits for the cluster ------------------------

    @property
    def info(self) -> ModelInfo:
        """What is known of the model, and how many workers have it."""
        here = self._latest()
        one: Mapping[str, Any] = next(iter(here.values()), {})
        count = f"{len(here)} worker{'' if len(here) == 1 else 's'}"
        return ModelInfo(
            name=self.model_name,
            precision=one.get("precision", ""),
            backend=f"{one['backend']} · {count}" if one else "",
        )

    @property
    def state(self) -> str:
        """As `EngineCore.state`, of all together."""
        states = {one["state"] for one in self._latest().values()}
        return next((state for state in ("running", "loading", "failed") if state in states), "closed")

    @property
    def failure(self) -> BaseException | None:
        """Why one of them failed."""
        return next((MlxNbError(one["failure"]) for one in self._latest().values() if one["failure"]), None)

    def get_stats(self) -> dict[str, Any]:
        """As `EngineCore.get_stats`: sums, and `workers` in place of `requests`."""
        here = self._latest()
        return {
            **{name: sum(one[name] for one in here.values()) for name in _SUMS},
            "paused": bool(here) and all(one["paused"] for one in here.values()),
            "loaded": any(one["loaded"] for one in here.values()),
            "memory": {name: sum(one["memory"][name] for one in here.values()) for name in _MEMORY},
            "workers": [_worker(address, one) for address, one in sorted(here.items())],
        }

    def get_cache_stats(self) -> Mapping[str, Any] | None:
        """Sums of the prefix caches' counters; None without any."""
        caches = [one["cache"] for one in self._latest().values() if one["cache"] is not None]
        return {name: sum(cache[name] for cache in caches) for name in caches[0]} if caches else None

    def abort(self, request_id: str) -> bool:  # noqa: ARG002 - a monitor's engine has it
        """Nothing: rows of a job are stopped by the job."""
        return False

    def abort_all(self) -> int:
        """Abort all requests of all engines."""
        count = sum(int(one["active_requests"]) for one in self._latest().values())
        self._order("abort_all")
        return count

    def clear_prefix_cache_soon(self) -> None:
        """Have all forget what they stored of earlier prompts."""
        self._order("clear_prefix_cache_soon")

    def pause(self) -> None:
        """Start no more requests until `resume`."""
        self._order("pause")

    def resume(self) -> None:
        """Undo `pause`."""
        self._order("resume")

    def stop_soon(self) -> None:
        """As `stop`."""
        self.stop()

    def restart_soon(self) -> None:
        """Not from a view: `start_workers` does."""

    def _latest(self) -> dict[str, dict[str, Any]]:
        return _engines(self._poll.latest())

    def _order(self, action: str) -> None:
        from .dask_worker import order_engine

        self.client.run(order_engine, action, on_error="ignore")


_SUMS = (
    "active_requests", "num_running", "num_waiting", "max_running", "num_requests_processed",
    "total_prompt_tokens", "total_completion_tokens", "generation_tps", "prompt_tps",
)  # fmt: skip
_MEMORY = ("active", "cache", "peak", "limit", "weights", "kv", "prefix")


def _engines(said: Mapping[str, dict[str, Any] | None]) -> dict[str, dict[str, Any]]:
    """By address; of workers that share a process, and so an engine, the first."""
    by_process = {
        (one["host"], one["pid"]): address for address, one in reversed(list(said.items())) if one is not None
    }
    return {
        address: one for address, one in said.items() if one is not None and address in by_process.values()
    }


def _worker(address: str, stats: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's row in the monitor."""
    partitions = stats["partitions"]
    running, waiting = stats["num_running"], stats["num_waiting"]
    many = f"{len(partitions)} partition{'' if len(partitions) == 1 else 's'}"
    return {
        "name": address.rpartition("/")[2],
        "state": stats["state"],
        "busy": bool(partitions or running or waiting),
        "work": f"{many}: {running} running, {waiting} waiting" if partitions else "–",  # noqa: RUF001
        "done": sum(done for done, _ in partitions),
        "total": sum(total or 0 for _, total in partitions),
        "tokens_per_second": stats["generation_tps"],
        "uptime_seconds": stats["uptime_seconds"],
        "tokens_saved": 0 if stats["cache"] is None else stats["cache"]["tokens_saved"],
    }


def check_client(client: Any) -> None:
    """Refuse what is no client that can be used here."""
    try:
        from distributed import Client
    except ImportError:
        raise RequestError("a client needs Dask: pip install 'mlx-nb[dask]'") from None
    if not isinstance(client, Client):
        raise RequestError(f"client is a distributed.Client, got {type(client).__name__}")
    if client.asynchronous:
        raise RequestError(
            "the client is asynchronous: make a distributed.Client(…) without that, agenerate awaits it"
        )
    if client.status != "running":
        raise RequestError(f"the client is {client.status}: make another distributed.Client(…)")


def client_in_use() -> Any:
    """The client that this process made last."""
    try:
        from distributed import default_client
    except ImportError:
        raise RequestError("a Dask frame needs a cluster's client: pip install 'mlx-nb[dask]'") from None
    try:
        return default_client()  # type: ignore[no-untyped-call]
    except ValueError:
        raise RequestError("a Dask frame needs a cluster: give client=distributed.Client(…)") from None


def _look(client: Any) -> dict[str, Any]:
    """What each worker's process runs, and its id."""
    from .dask_worker import look

    found: dict[str, Any] = client.run(look, on_error="return")
    if not found:
        raise RequestError("the cluster has no workers: give it some first (cluster.scale(2))")
    for address, what in found.items():
        if isinstance(what, ImportError):
            raise RequestError(
                f"worker {address} can't import mlx_nb ({what}): pip install 'mlx-nb[dask]' there"
            )
        if isinstance(what, Exception):
            raise RequestError(f"worker {address} can't be asked: {type(what).__name__}: {what}")
    return found


def _named(model: str | Path | None, running: set[str]) -> str:
    """The model that is meant: by its full path, since workers may have other folders."""
    if model is not None:
        return _absolute(model) or ""
    if len(running) == 1:
        return next(iter(running))
    if running:
        raise RequestError(f"the workers run several models ({', '.join(sorted(running))}): restart them")
    current = default_session().current
    if current is None:
        raise EngineNotStarted(
            "the workers run no model: say which (model=…), or mlx_nb.start_workers(client, MODEL)"
        )
    return _absolute(current.model) or ""


def _absolute(path: str | Path | None) -> str | None:
    if path is None:
        return None
    there = Path(path).expanduser()
    return str(there.resolve()) if there.exists() else str(path)


def _shared(recipe: Any, found: Mapping[str, tuple[Any, int]]) -> Any:
    """A recipe whose engine leaves their part to the others of its machine."""
    from distributed.comm.addressing import get_address_host

    processes = {(get_address_host(address), pid) for address, (_, pid) in found.items()}
    most = max(Counter(host for host, _ in processes).values())
    config = recipe.config or EngineConfig()
    config = replace(config, gpu_memory_utilization=max(0.01, config.gpu_memory_utilization / most))
    ours = any(pid == os.getpid() for _, pid in processes)
    threads = None if ours else max(1, (os.cpu_count() or 1) // most)
    return replace(recipe, config=config, blas_threads=threads)
