"""``%mlx_engine``: one method a subcommand. Its options stand in `engine_options`, its waiting in `pending`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from IPython.core.error import UsageError

from ..errors import EngineNotStarted
from ..session.session import START_HINT, NamedEngine, Session
from .arguments import did_you_mean
from .engine_options import CACHE_ACTIONS, COMMANDS, engine_config, help_text, remote_engine, single_stream
from .kernel import in_kernel
from .pending import Loading, Pending, Work, starting
from .stream import one_line_errors
from .views import place

__all__ = ["COMMANDS", "EngineCommands"]


class EngineCommands:
    """The subcommands, for one shell and one session.

    A method takes the words and the options of its subcommand. It returns the magic's value, or something
    `Pending` that will have it.
    """

    def __init__(self, shell: Any, session: Session) -> None:
        self._shell, self._session = shell, session
        self._monitors: weakref.WeakSet[Any] = weakref.WeakSet()

    def run(self, line: str) -> Any:
        """Carry out a line, blocking."""
        with one_line_errors():
            outcome = self._begin(line)
            return outcome.wait() if isinstance(outcome, Pending) else outcome

    async def run_awaited(self, line: str) -> Any:
        """Carry out a line, awaiting what takes time."""
        with one_line_errors():
            outcome = self._begin(line)
            return await outcome.wait_awaited() if isinstance(outcome, Pending) else outcome

    def close(self) -> None:
        """Close the monitors that were shown."""
        for monitor in list(self._monitors):
            monitor.close()

    def _begin(self, line: str) -> Any:
        command, _, rest = line.strip().removesuffix(";").partition(" ")
        command = command or "status"
        options = COMMANDS.get(command)
        if options is None:
            raise UsageError(f"unknown command %mlx_engine {command}: {did_you_mean(command, COMMANDS)}")
        given, words = options.with_words(rest)
        return getattr(self, f"_{command}")(words, **given)

    # -- their life -------------------------------------------------------------------------------------

    def _start(
        self,
        words: list[str],
        name: str | None = None,
        adapter: str | None = None,
        trust_remote_code: bool = False,
        blas_threads: int | None = None,
        distributed: bool = False,
        **settings: Any,
    ) -> Pending | None:
        model = _at_most_one(words, "start")
        if model is None:
            raise UsageError(
                "which model? %mlx_engine start demo, or a Hub id, a folder, a .gguf file, an alias"
            )
        before = self._session.current
        known = self._session.engines.get(name or "default")
        engine = self._session.start(
            model,
            name=name,
            single=single_stream(settings),
            config=engine_config(settings),
            adapter_path=adapter,
            trust_remote_code=trust_remote_code,
            blas_threads=blas_threads,
            distributed=distributed,
        )
        if engine is known and engine.core.state == "running":
            _say(f"{engine.model} runs already, as {engine.name!r}; to change its options, stop it first")
            return None
        return starting(self._shell, self._session, engine, before)

    def _connect(self, words: list[str], name: str | None = None, **given: Any) -> Pending | None:
        if len(words) != 1:  # what there is too much isn't shown: it may be a key
            raise UsageError("which server? it takes one URL: %mlx_engine connect http://localhost:8080")
        before = self._session.current
        known = self._session.engines.get(name or "default")
        remote, config = remote_engine(words[0], given)
        engine = self._session.connect(remote, name=name, config=config)
        if engine is known and engine.core.state == "running":
            _say(
                f"{engine.model} is connected already, as {engine.name!r}; to change its options, stop it first"
            )
            return None
        return starting(self._shell, self._session, engine, before)

    def _restart(self, words: list[str]) -> Pending:
        engine = self._session.find(_at_most_one(words, "restart"))
        if engine.core.state == "closed":
            self._session.get(engine.name)  # raises, saying what to do
        engine.core.restart_soon()
        self._session.use(engine.name)
        # It stays in the session even if it doesn't load, so that it can be restarted once more.
        return Loading(self._shell, engine, lambda: _let_go(engine))

    def _stop(self, words: list[str]) -> Pending | None:
        engine = self._session.find(_at_most_one(words, "stop"))
        loading = engine.core.state == "loading"
        self._session.forget(engine.name)
        if loading:
            _say(f"{engine.name!r} is given up; what it loads is discarded when loading returns")
            return None

        def stopped(_: None) -> None:
            engine.core.close()
            _say(f"{engine.name!r} ({engine.model}) is stopped")

        return Work(f"stopping {engine.name!r}", engine.core.stop_now, stopped)

    def _pause(self, words: list[str]) -> None:
        engine = self._session.get(_at_most_one(words, "pause"))
        engine.core.pause()
        _say(f"{engine.name!r} starts no more requests: %mlx_engine resume {engine.name} undoes it")

    def _resume(self, words: list[str]) -> None:
        engine = self._session.get(_at_most_one(words, "resume"))
        engine.core.resume()
        _say(f"{engine.name!r} takes requests")

    def _use(self, words: list[str]) -> None:
        name = _at_most_one(words, "use")
        if name is None:
            raise UsageError(f"which engine? there is {_listed(self._session.engines)}")
        _say(_describe(self._session.use(name)))

    def _warm(self, words: list[str]) -> Pending:
        engine = self._session.get(_at_most_one(words, "warm"))
        return Work(
            f"warming {engine.name!r}",
            engine.core.warm_up_now,
            lambda _: _say(f"{engine.name!r} is warm"),
        )

    # -- looking ----------------------------------------------------------------------------------------

    def _status(self, words: list[str]) -> None:
        name = _at_most_one(words, "status")
        if name is None and self._session.current is None:
            _say(START_HINT)
            return
        engine = self._session.find(name)
        if in_kernel(self._shell) and engine.core.is_running():
            self._show_monitor(engine)
        else:
            _say(_describe(engine))

    def _list(self, words: list[str]) -> None:
        if words:
            raise UsageError(f"%mlx_engine list takes no name; did you mean %mlx_engine status {words[0]}?")
        current = self._session.current
        rows = [
            f"{'*' if engine is current else ' '} {_describe(engine)}"
            for engine in self._session.engines.values()
        ]
        _say("\n".join(rows) or START_HINT)

    def _stats(self, words: list[str], out: str | None = None) -> Any:
        return self._give(self._session.find(_at_most_one(words, "stats")).core.get_stats(), out)

    def _requests(self, words: list[str], out: str | None = None) -> Any:
        engine = self._session.find(_at_most_one(words, "requests"))
        from ..frames.requests import requests_frame

        return self._give(requests_frame(engine.core.get_stats()["requests"]), out)

    def _monitor(self, words: list[str]) -> None:
        engine = self._session.find(_at_most_one(words, "monitor"))
        if not in_kernel(self._shell):
            raise UsageError("the monitor needs a notebook; %mlx_engine status works here")
        self._show_monitor(engine)

    def _show_monitor(self, engine: NamedEngine) -> None:
        from ..widgets import MonitorWidget

        monitor = MonitorWidget(engine.core, name=engine.name)
        self._monitors.add(monitor)
        place(monitor)

    # -- requests and caches ----------------------------------------------------------------------------

    def _abort(self, words: list[str], all: bool = False, engine: str | None = None) -> None:  # noqa: A002
        if all == bool(words):
            raise UsageError("which request? give its id (%mlx_engine requests shows them), or --all")
        if all:
            count = self._session.find(engine).core.abort_all()
            _say("1 request is aborted" if count == 1 else f"{count} requests are aborted")
            return
        engines = [self._session.find(engine)] if engine else list(self._session.engines.values())
        unknown = [word for word in words if not any(each.core.abort(word) for each in engines)]
        if unknown:
            raise UsageError(f"no live request {_listed(unknown)}: %mlx_engine requests shows them")
        _say(f"{_listed(words)} {'is' if len(words) == 1 else 'are'} aborted")

    def _cache(self, words: list[str], engine: str | None = None, out: str | None = None) -> Any:
        action, *folders = words or [""]
        if action not in CACHE_ACTIONS:
            raise UsageError(f"%mlx_engine cache takes {', '.join(CACHE_ACTIONS)}; got {action!r}")
        if len(folders) != (action in ("save", "load")):
            takes = "one folder" if action in ("save", "load") else "no folder"
            raise UsageError(f"%mlx_engine cache {action} takes {takes}, got {len(folders)}")
        if out is not None and action != "stats":
            raise UsageError(f"-o is for %mlx_engine cache stats; {action} has no value")
        core = self._session.get(engine).core
        if core.info.remote:
            raise UsageError("the server keeps its own prefix cache: there is none in this process")
        stats = core.get_cache_stats()
        if stats is None and core.state == "running" and not core.config.scheduler_config.enable_prefix_cache:
            raise UsageError("this engine keeps no prefix cache: it was started with --no-prefix-cache")
        what = f"cache {action}"
        match action:
            case "stats":
                if stats is None:
                    raise UsageError("the model is not in memory, and nothing is stored: ask something first")
                return self._give(stats, out)
            case "clear":
                return Work(what, core.clear_prefix_cache, lambda _: _say("the prefix cache is empty"))
            case "save":
                return Work(what, lambda: core.save_cache_to_disk(folders[0]), _saved(folders[0]))
            case _:
                return Work(what, lambda: core.load_cache_from_disk(folders[0]), _loaded(folders[0]))

    # -- models and this machine ------------------------------------------------------------------------

    def _models(self, words: list[str]) -> Pending:
        _none(words, "models")
        from ..session.models import on_disk

        return Work("looking for models", on_disk, lambda found: _say(self._table_of(found)))

    def _table_of(self, found: list[Any]) -> str:
        running: dict[str, list[str]] = {}
        for engine in self._session.engines.values():
            running.setdefault(engine.model, []).append(engine.name)
        rows = []
        for model in found:
            names = [name for known in (model.name, *model.aliases) for name in running.pop(known, ())]
            remarks = [f"running as {_listed(names)}"] if names else []
            remarks += [] if model.complete else ["download interrupted: start it to go on"]
            remarks += [f"alias {_listed(model.aliases)}"] if model.aliases else []
            memory = "" if model.memory is None else f"{_size(model.memory)} in memory"
            row = (model.name, model.precision, f"{_size(model.size)} on disk", memory, "; ".join(remarks))
            rows.append(row)
        rows += [(model, "", "", "", f"running as {_listed(names)}") for model, names in running.items()]
        return _aligned(rows) or "no models on disk yet: %mlx_engine start demo fetches a small one"

    @staticmethod
    def _alias(words: list[str], remove: str | None = None) -> None:
        from ..backends import sources

        if remove is not None:
            _none(words, "alias --remove NAME")
            sources.set_alias(remove, None)
            _say(f"{remove} is no alias of yours any more")
        elif not words:
            _say(_aligned([(name, model) for name, model in sources.aliases().items()]))
        elif len(words) == 2:
            sources.set_alias(*words)
            _say(f"{words[0]} now stands for {sources.aliases()[words[0]]}")
        else:
            raise UsageError("%mlx_engine alias takes a name and a model: %mlx_engine alias small demo")

    def _doctor(self, words: list[str]) -> Pending:
        _none(words, "doctor")
        from ..session.doctor import examine, report

        def say(findings: list[Any]) -> None:
            _say(report(findings))
            for engine in self._session.engines.values():
                if not engine.core.is_running():
                    try:
                        self._session.get(engine.name)
                    except EngineNotStarted as error:
                        _say(f"✗ {error}")

        return Work("the examination", examine, say)

    @staticmethod
    def _help(words: list[str]) -> None:
        _say(help_text(_at_most_one(words, "help")))

    def _give(self, value: Any, out: str | None) -> Any:
        """The value, as the magic's or into a variable."""
        if out is None:
            return value
        self._shell.push({out: value}, interactive=False)
        return None


def _let_go(engine: NamedEngine) -> None:
    if engine.core.state == "loading":
        engine.core.stop_soon()


def _saved(folder: str) -> Callable[[bool], None]:
    def say(saved: bool) -> None:
        _say(f"the prefix cache is in {folder}" if saved else "the prefix cache is empty: nothing was saved")

    return say


def _loaded(folder: str) -> Callable[[int], None]:
    return lambda count: _say(f"{count} {'prefix' if count == 1 else 'prefixes'} loaded from {folder}")


def _at_most_one(words: list[str], command: str) -> str | None:
    if len(words) > 1:
        raise UsageError(f"%mlx_engine {command} takes one name, got {' '.join(words)!r}")
    return words[0] if words else None


def _none(words: list[str], command: str) -> None:
    if words:
        raise UsageError(f"%mlx_engine {command} takes nothing more, got {' '.join(words)!r}")


def _describe(engine: NamedEngine) -> str:
    core = engine.core
    stats = core.get_stats()
    parts = [engine.name, core.model_name or engine.model, _state(core.state, stats)]
    if core.state == "loading" and core.progress is not None:
        parts.append(core.progress.message)
    if core.state == "failed":
        parts.append(str(core.failure))
    if core.state in ("failed", "stopped"):
        parts.append(f"%mlx_engine restart {engine.name}")
    if core.state == "running":
        parts.append(f"{stats['num_running']} running, {stats['num_waiting']} waiting")
        parts.append(f"{stats['generation_tps']:.1f} tokens/s")
        parts.append(_of_server(stats) if core.info.remote else f"{stats['memory']['active'] / 1e6:,.0f} MB")
    return " · ".join(parts)


def _of_server(stats: dict[str, Any]) -> str:
    """Where a remote engine's model is, and what its requests wait for."""
    server = stats["remote"]
    return server["url"] if server["problem"] is None else f"asking again: {server['problem']}"


def _state(state: str, stats: dict[str, Any]) -> str:
    if state != "running":
        return state
    words = ["paused"] if stats["paused"] else []
    words += [] if stats["loaded"] or stats["active_requests"] else ["unloaded"]
    return ", ".join(words) or state


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _size(count: int) -> str:
    from ..backends.fit import size

    return size(count)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
