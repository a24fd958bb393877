"""Reads an engine for the monitor: statistics in, wire bands out.

Owns what the monitor may ask of an engine (`Monitored`) and how its numbers are rounded: to what a reader can
see, so that a change nobody would notice is not sent. Starts nothing and keeps nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypedDict

from .protocol import (
    MAX_ROWS,
    EngineBand,
    LoadBand,
    MemoryBand,
    MonitorState,
    PrefixBand,
    RequestPhase,
    RequestProgress,
    RequestRow,
)

_BYTES_STEP = 1_000_000
_PROMPT_CHARACTERS = 120
_STATES: Mapping[str, MonitorState] = {"loading": "loading", "failed": "error"}
_PHASES: Mapping[str, RequestPhase] = {"waiting": "waiting", "queued": "waiting", "prefill": "prefill"}


class EngineInfo(Protocol):
    """What is known of the engine's model; empty until it is loaded."""

    @property
    def precision(self) -> str:
        """How the weights are kept: "4-bit", "float32", …."""

    @property
    def backend(self) -> str:
        """What computes: "MLX 0.32, Metal", …."""


class Monitored(Protocol):
    """What the monitor needs of an engine; every member may be used from any thread and returns at once.

    `EngineCore` satisfies it.

    `get_stats()` holds the names of the engine's statistics and, for the monitor, `max_running` (rows that
    run at once), `paused`, `loaded` (whether the model is in memory),
    in `memory` also `weights`, `kv` and `prefix` (bytes), and in each row of `requests` a
    `prompt_preview`; `remote`, of an engine that is a server, has a `problem` or None. `generation_tps` and
    `prompt_tps` are rates of the last moments, 0 when nothing runs.
    A row's `progress` is the fraction of its phase that is done. Engines of a cluster have `workers` in place of
    `requests`: name, state, busy, work (in words), done and total (rows), tokens_per_second, uptime_seconds and
    tokens_saved of each.
    """

    @property
    def model_name(self) -> str:
        """The name a person would type to start the engine again."""

    @property
    def info(self) -> EngineInfo:
        """What is known of the model."""

    @property
    def state(self) -> str:
        """One of loading, running, failed, closed; anything else is an engine that is stopped."""

    @property
    def failure(self) -> BaseException | None:
        """Why the engine failed."""

    def get_stats(self) -> dict[str, Any]:
        """Return the statistics of this moment."""

    def get_cache_stats(self) -> Mapping[str, Any] | None:
        """Return the prefix cache's counters, or None without a cache."""

    def abort(self, request_id: str) -> bool:
        """Ask for the end of one request; True if it was live."""

    def abort_all(self) -> int:
        """Ask for the end of every request; return how many there were."""

    def clear_prefix_cache_soon(self) -> None:
        """Ask for the stored prefixes to be dropped, without waiting for it."""

    def pause(self) -> None:
        """Start no more requests for now."""

    def resume(self) -> None:
        """Start requests again."""

    def stop_soon(self) -> object:
        """Ask the engine to stop, without waiting for it."""

    def restart_soon(self) -> None:
        """Ask the engine to start again, without waiting for it."""


class Reading(TypedDict):
    """Everything the monitor shows, except the sparklines' past."""

    engine: EngineBand
    load: LoadBand
    memory: MemoryBand
    prefix: PrefixBand
    rows: list[RequestRow]
    progress: list[RequestProgress]
    hidden_requests: int


def read(engine: Monitored, name: str | None = None, notice: str | None = None) -> Reading:
    """Read `engine` once; `name` is what ``%mlx_engine`` calls it."""
    stats = engine.get_stats()
    notice = notice or (stats.get("remote") or {}).get("problem")
    requests: Sequence[Mapping[str, Any]] = stats.get("requests") or ()
    workers: Sequence[Mapping[str, Any]] | None = stats.get("workers")
    load = _load(stats)
    if workers is not None:
        rows, progress = map(_worker, workers), map(_work, workers)
    else:
        rows, progress = map(_row, requests), map(_progress, requests)
    return {
        "engine": _engine(
            engine, _state(engine.state, stats, load), name, notice, workers=workers is not None
        ),
        "load": load,
        "memory": _memory(stats.get("memory") or {}),
        "prefix": _prefix(engine.get_cache_stats(), stats.get("memory") or {}),
        "rows": list(islice(rows, MAX_ROWS)),
        "progress": list(islice(progress, MAX_ROWS)),
        "hidden_requests": max(0, len(requests if workers is None else workers) - MAX_ROWS),
    }


def without_engine(reading: Reading, state: MonitorState, failure: str | None = None) -> Reading:
    """Return `reading` as it looks when nothing runs any more: the identity stays, what was live is gone."""
    load = reading["load"]
    memory: MemoryBand = dict.fromkeys(reading["memory"])  # type: ignore[assignment]  # the same keys, all None
    return {
        "engine": {
            **reading["engine"],
            "state": state,
            "failure": failure,
            "can_restart": False,
            "notice": None,
        },
        "load": {**load, "decode": 0.0, "prefill": 0.0, "running": 0, "waiting": 0},
        "memory": memory,
        "prefix": {**reading["prefix"], "entries": 0, "bytes": None},
        "rows": [],
        "progress": [],
        "hidden_requests": 0,
    }


def one_line(error: BaseException | None) -> str:
    """Return what `error` says, in one line."""
    return " ".join(str(error or "").split()) or (
        "no reason given" if error is None else type(error).__name__
    )


NOTHING_YET: Reading = {
    "engine": {
        "state": "stopped",
        "model": "",
        "precision": "",
        "backend": "",
        "failure": None,
        "command": "%mlx_engine start MODEL",
        "can_restart": False,
        "notice": None,
        "workers": False,
    },
    "load": {"decode": 0.0, "prefill": 0.0, "running": 0, "waiting": 0, "finished": 0, "slots": None},
    "memory": {"weights": None, "kv": None, "prefix": None, "other": None, "pool": None, "limit": None},
    "prefix": {"enabled": False, "entries": 0, "bytes": None, "hit_rate": None, "tokens_saved": 0},
    "rows": [],
    "progress": [],
    "hidden_requests": 0,
}


def _state(state: str, stats: Mapping[str, Any], load: LoadBand) -> MonitorState:
    if state != "running":
        return _STATES.get(state, "stopped")
    if stats.get("paused"):
        return "paused"
    if load["running"] + load["waiting"]:
        return "running"
    return "idle" if stats.get("loaded") else "unloaded"


def _engine(
    engine: Monitored, state: MonitorState, name: str | None, notice: str | None, *, workers: bool
) -> EngineBand:
    info, closed = engine.info, engine.state == "closed"
    model = shlex.quote(engine.model_name) if engine.model_name else "MODEL"
    again = f"start {model}" if name is None or closed else f"restart {shlex.quote(name)}"
    command = f"mlx_nb.start_workers(client, {engine.model_name!r})" if workers else f"%mlx_engine {again}"
    return {
        "state": state,
        "model": engine.model_name,
        "precision": info.precision,
        "backend": info.backend,
        "failure": one_line(engine.failure) if state == "error" else None,
        "command": command,
        "can_restart": state in ("stopped", "error") and not closed,
        "notice": notice,
        "workers": workers,
    }


def _load(stats: Mapping[str, Any]) -> LoadBand:
    return {
        "decode": round(float(stats.get("generation_tps") or 0), 1),
        "prefill": round(float(stats.get("prompt_tps") or 0), 1),
        "running": int(stats.get("num_running") or 0),
        "waiting": int(stats.get("num_waiting") or 0),
        "finished": int(stats.get("num_requests_processed") or 0),
        "slots": stats.get("max_running"),
    }


def _memory(memory: Mapping[str, Any]) -> MemoryBand:
    weights, kv, prefix, active = (_bytes(memory.get(key)) for key in ("weights", "kv", "prefix", "active"))
    named = (weights or 0) + (kv or 0) + (prefix or 0)
    return {
        "weights": weights,
        "kv": kv,
        "prefix": prefix,
        "other": None if active is None else max(0, active - named),
        "pool": _bytes(memory.get("cache")),
        "limit": _bytes(memory.get("limit")) or None,
    }


def _prefix(cache: Mapping[str, Any] | None, memory: Mapping[str, Any]) -> PrefixBand:
    if cache is None:
        return {"enabled": False, "entries": 0, "bytes": None, "hit_rate": None, "tokens_saved": 0}
    hits, misses = int(cache.get("hits") or 0), int(cache.get("misses") or 0)
    return {
        "enabled": True,
        "entries": int(cache.get("entry_count") or 0),
        "bytes": _bytes(memory.get("prefix")),
        "hit_rate": round(hits / (hits + misses), 2) if hits + misses else None,
        "tokens_saved": int(cache.get("tokens_saved") or 0),
    }


def _row(request: Mapping[str, Any]) -> RequestRow:
    preview = " ".join(str(request.get("prompt_preview") or "").split())
    return {"id": str(request["request_id"]), "prompt": preview[:_PROMPT_CHARACTERS]}


def _progress(request: Mapping[str, Any]) -> RequestProgress:
    phase = _PHASES.get(str(request.get("phase") or request.get("status")), "decode")
    rate = request.get("tokens_per_second")
    prompt_tokens = int(request.get("prompt_tokens") or 0)
    if phase == "decode":
        done, total = int(request.get("completion_tokens") or 0), int(request.get("max_tokens") or 0)
    else:
        fraction = float(request.get("progress") or 0) if phase == "prefill" else 0.0
        done, total = round(min(1.0, fraction) * prompt_tokens), prompt_tokens
    return {
        "phase": phase,
        "done": done,
        "total": total,
        "rate": round(float(rate), 1) if rate else None,
        "elapsed": round(float(request.get("elapsed_s") or 0), 1),
        "cached": int(request.get("cached_tokens") or 0),
    }


def _worker(worker: Mapping[str, Any]) -> RequestRow:
    """The row of a cluster's worker."""
    return {"id": str(worker["name"]), "prompt": str(worker["work"])[:_PROMPT_CHARACTERS]}


def _work(worker: Mapping[str, Any]) -> RequestProgress:
    busy: RequestPhase = "decode" if worker["busy"] else "waiting"
    return {
        "phase": "prefill" if worker["state"] == "loading" else busy,
        "done": int(worker["done"]),
        "total": int(worker["total"]),
        "rate": round(float(worker["tokens_per_second"]), 1) or None,
        "elapsed": round(float(worker["uptime_seconds"]), 1),
        "cached": int(worker["tokens_saved"]),
    }


def _bytes(value: float | None) -> int | None:
    return None if value is None else round(value / _BYTES_STEP) * _BYTES_STEP
