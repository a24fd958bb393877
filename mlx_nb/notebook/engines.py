"""``%mlx_engine``: one method a subcommand, each with its options."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from ..config import EngineConfig, SchedulerConfig
from ..session.session import START_HINT, NamedEngine, Session
from .arguments import Option, Options, did_you_mean, variable
from .kernel import in_kernel, interrupts_raise
from .stream import interrupted, one_line_errors
from .views import StatusLine, place

__all__ = ["COMMANDS", "EngineCommands"]

PROGRESS_S = 0.1

COMMANDS = {
    "start": Options(
        "%mlx_engine start MODEL [options]    load a model: demo, a Hub id, a folder, a .gguf file or an alias",
        Option("--name", "what to call the engine; several can run side by side", "NAME"),
        Option("--max-num-seqs", "most requests that run at once", "N", int),
        Option("--max-num-batched-tokens", "prompt tokens read at once", "N", int),
        Option("--no-prefix-cache", "keep nothing of finished requests"),
        Option("--policy", "order of requests: fcfs or priority", "NAME"),
        Option("--adapter", "folder of a LoRA adapter", "FOLDER"),
        Option("--trust-remote-code", "run code that comes with the model"),
    ),
    "status": Options("%mlx_engine status [NAME]            how the engine is doing"),
    "stop": Options("%mlx_engine stop [NAME]              stop it and free its memory"),
    "list": Options("%mlx_engine list                     all engines; * marks the current one"),
    "stats": Options(
        "%mlx_engine stats [NAME] [-o VAR]    statistics, as a dict",
        Option("-o --out", "put them into this variable", "NAME", variable),
    ),
    "monitor": Options("%mlx_engine monitor [NAME]           a live view, with buttons to abort"),
    "help": Options("%mlx_engine help                     this text"),
}


class EngineCommands:
    """The subcommands, for one shell and one session."""

    def __init__(self, shell: Any, session: Session) -> None:
        self._shell, self._session = shell, session
        self._monitors: weakref.WeakSet[Any] = weakref.WeakSet()

    def run(self, line: str) -> Any:
        """Carry out a line, blocking."""
        with one_line_errors():
            command, given, words = _parse(line)
            if command == "start":
                loading = self._start(words, **given)
                return loading.wait() if loading else None
            if command == "stop":
                stopping = self._stop(words)
                if stopping is not None:
                    with interrupts_raise():
                        stopping.core.stop_now()
                    self._stopped(stopping)
                return None
            return self._look(command, words, given)

    async def run_awaited(self, line: str) -> Any:
        """Carry out a line, awaiting what takes time."""
        with one_line_errors():
            command, given, words = _parse(line)
            if command == "start":
                loading = self._start(words, **given)
                return await loading.wait_awaited() if loading else None
            if command == "stop":
                stopping = self._stop(words)
                if stopping is not None:
                    await stopping.core.stop()
                    self._stopped(stopping)
                return None
            return self._look(command, words, given)

    def close(self) -> None:
        """Close the monitors that were shown."""
        for monitor in list(self._monitors):
            monitor.close()

    def _look(self, command: str, words: list[str], given: dict[str, Any]) -> Any:
        looks: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "list": self._list,
            "stats": self._stats,
            "monitor": self._monitor,
            "help": self._help,
        }
        return looks[command](_at_most_one(words, command), **given)

    def _start(
        self,
        words: list[str],
        name: str | None = None,
        no_prefix_cache: bool = False,
        adapter: str | None = None,
        trust_remote_code: bool = False,
        **scheduler: Any,
    ) -> _Loading | None:
        model = _at_most_one(words, "start")
        if model is None:
            raise UsageError(
                "which model? %mlx_engine start demo, or a Hub id, a folder, a .gguf file, an alias"
            )
        config = EngineConfig(
            scheduler_config=SchedulerConfig(enable_prefix_cache=not no_prefix_cache, **scheduler)
        )
        before = self._session.current
        known = self._session.engines.get(name or "default")
        engine = self._session.start(
            model, name=name, config=config, adapter_path=adapter, trust_remote_code=trust_remote_code
        )
        if engine is known and engine.core.state == "running":
            _say(f"{engine.model} runs already, as {engine.name!r}; to change its options, stop it first")
            return None
        return _Loading(self._shell, self._session, engine, before)

    def _stop(self, words: list[str]) -> NamedEngine | None:
        """Take an engine out of the session; the engine if its end is worth waiting for."""
        engine = self._session.find(_at_most_one(words, "stop"))
        loading = engine.core.state == "loading"
        self._session.forget(engine.name)
        if not loading:
            return engine
        _say(f"{engine.name!r} is given up; what it loads is discarded when loading returns")
        return None

    @staticmethod
    def _stopped(engine: NamedEngine) -> None:
        engine.core.close()
        _say(f"{engine.name!r} ({engine.model}) is stopped")

    def _status(self, name: str | None) -> None:
        if name is None and self._session.current is None:
            _say(START_HINT)
        else:
            _say(_describe(self._session.find(name)))

    def _list(self, name: str | None) -> None:
        if name is not None:
            raise UsageError(f"%mlx_engine list takes no name; did you mean %mlx_engine status {name}?")
        current = self._session.current
        rows = [
            f"{'*' if engine is current else ' '} {_describe(engine)}"
            for engine in self._session.engines.values()
        ]
        _say("\n".join(rows) or START_HINT)

    def _stats(self, name: str | None, out: str | None = None) -> dict[str, Any] | None:
        stats = self._session.find(name).core.get_stats()
        if out is None:
            return stats
        self._shell.push({out: stats}, interactive=False)
        return None

    def _monitor(self, name: str | None) -> None:
        engine = self._session.find(name)
        if not in_kernel(self._shell):
            raise UsageError("the monitor needs a notebook; %mlx_engine status works here")
        from ..widgets import MonitorWidget

        monitor = MonitorWidget(engine.core)
        self._monitors.add(monitor)
        place(monitor)

    @staticmethod
    def _help(_name: str | None) -> None:
        _say("\n".join(options.help() for options in COMMANDS.values()))


class _Loading:
    """An engine whose model loads, watched by a cell.

    If the cell is interrupted, what was loaded is discarded when loading returns; if loading fails, no trace of
    the engine stays.
    """

    def __init__(self, shell: Any, session: Session, engine: NamedEngine, before: NamedEngine | None) -> None:
        self._session, self._engine, self._before = session, engine, before
        self._line = StatusLine(shell)
        self._began = time.monotonic()

    def wait(self) -> None:
        """Block until the model is there."""
        core = self._engine.core
        try:
            with interrupts_raise():
                while core.state == "loading":
                    self._show()
                    _wait_a_moment(core)
                core.wait_ready()
        except BaseException as error:
            self._discard(error)
        self._done()

    async def wait_awaited(self) -> None:
        """Await the model."""
        ready = asyncio.ensure_future(self._engine.core.ready())
        try:
            while not ready.done():
                self._show()
                await asyncio.wait([ready], timeout=PROGRESS_S)
            await ready
        except BaseException as error:
            ready.cancel()
            self._discard(error)
        self._done()

    def _show(self) -> None:
        progress = self._engine.core.progress
        about = f": {progress.message}" if progress and progress.message else " …"
        part = f" ({progress.fraction:.0%})" if progress and progress.fraction is not None else ""
        self._line.show(f"Loading {self._engine.model}{about}{part}")

    def _discard(self, error: BaseException) -> None:
        name, model = self._engine.name, self._engine.model
        if self._session.engines.get(name) is self._engine:
            self._session.forget(name)
            if self._before is not None and self._before.name in self._session.engines:
                self._session.use(self._before.name)
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            self._line.show(f"Loading {model} was interrupted")
            raise interrupted(f"loading {model} was interrupted; no engine was started") from None
        self._line.show(f"Loading {model} failed")
        raise error

    def _done(self) -> None:
        info = self._engine.core.info
        about = [info.precision, info.backend]
        if info.context_length:
            about.append(f"{info.context_length:,} tokens of context")
        if info.weight_bytes:
            about.append(f"{info.weight_bytes / 1e6:,.0f} MB")
        about.append(f"loaded in {time.monotonic() - self._began:.1f} s")
        name = self._engine.name
        called = "" if name == "default" else f", called {name!r}"
        self._line.show(f"{info.name} is ready{called}: {', '.join(filter(None, about))}")


def _wait_a_moment(core: Any) -> None:
    try:
        core.wait_ready(PROGRESS_S)
    except TimeoutError:
        if core.state != "loading":  # the failure itself, not the end of our patience
            raise


def _parse(line: str) -> tuple[str, dict[str, Any], list[str]]:
    """The subcommand ("status" if there is none), its options and its words."""
    command, _, rest = line.strip().removesuffix(";").partition(" ")
    command = command or "status"
    options = COMMANDS.get(command)
    if options is None:
        raise UsageError(f"unknown command %mlx_engine {command}: {did_you_mean(command, COMMANDS)}")
    return command, *options.with_words(rest)


def _at_most_one(words: list[str], command: str) -> str | None:
    if len(words) > 1:
        raise UsageError(f"%mlx_engine {command} takes one name, got {' '.join(words)!r}")
    return words[0] if words else None


def _describe(engine: NamedEngine) -> str:
    core = engine.core
    parts = [engine.name, core.model_name or engine.model, core.state]
    if core.state == "failed":
        parts.append(str(core.failure))
    if core.state == "running":
        stats = core.get_stats()
        parts.append(f"{stats['num_running']} running, {stats['num_waiting']} waiting")
        parts.append(f"{stats['generation_tps']:.1f} tokens/s")
        parts.append(f"{stats['memory']['active'] / 1e6:,.0f} MB")
    return " · ".join(parts)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
