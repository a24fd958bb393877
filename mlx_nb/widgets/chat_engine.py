"""Which engine a chat panel asks: one by name, whatever is the current one, or a given one, held weakly.

Owns how that engine is doing, in the words of the panel, and what brings one back that does not run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ..engine.async_core import AsyncEngineCore
from ..engine.core import EngineCore
from ..errors import EngineNotStarted, MlxNbError
from ..session.session import NamedEngine, default_session
from .protocol import ChatHead, ChatState
from .readings import one_line

__all__ = ["ChatEngine", "Engine"]

Engine = str | AsyncEngineCore | EngineCore
"""An engine's name, or an engine."""

_GONE = "the engine is gone: make another panel, with an engine that runs"
_STATES: dict[str, ChatState] = {"loading": "loading", "running": "idle", "failed": "error"}


class ChatEngine:
    """The engine of one panel.

    Parameters
    ----------
    engine : str, AsyncEngineCore or EngineCore, optional
        None is the session's current one, whichever that is by then.
    """

    def __init__(self, engine: Engine | None) -> None:
        self._given: Callable[[], EngineCore | None] | None = None
        self._name = engine if isinstance(engine, str) else None
        if isinstance(engine, AsyncEngineCore):
            engine = engine.engine
        if isinstance(engine, EngineCore):
            self._given = weakref.ref(engine)
        elif not isinstance(engine, str | None):
            raise TypeError(f"engine is a name or an engine, got {engine!r}")

    def find(self) -> EngineCore:
        """The engine, running or loading; EngineNotStarted says what to do."""
        named, core = self._look()
        if named is not None:
            return default_session().get(named.name).core
        assert core is not None
        if not core.is_running():
            raise EngineNotStarted(_why_not(core))
        return core

    def head(self, *, busy: bool, model: str) -> ChatHead:
        """How it is doing; `model` is the name to show where there is no engine."""
        head: ChatHead = {
            "state": "stopped",
            "model": model,
            "problem": None,
            "command": None,
            "takes_images": False,
            "can_think": False,
        }
        try:
            named, core = self._look()
        except MlxNbError as error:
            command = None if self._given is not None else "%mlx_engine start demo"
            return {**head, "problem": one_line(error), "command": command}
        core = core or (named.core if named is not None else None)
        assert core is not None
        head |= {
            "model": core.model_name,
            "state": _STATES.get(core.state, "stopped"),
            "takes_images": core.info.takes_images,
            "can_think": _can_think(core),
        }
        if core.state == "running":
            head["state"] = "running" if busy else "idle"
        elif core.state != "loading":
            head |= {"problem": _why_not(core) if named is None else _why(named), "command": _command(named)}
        return head

    def _look(self) -> tuple[NamedEngine | None, EngineCore | None]:
        """The engine as the session knows it, or else the given one; EngineNotStarted if there is none."""
        if self._given is None:
            return default_session().find(self._name), None
        core = self._given()
        if core is None:
            raise EngineNotStarted(_GONE)
        known = default_session().engines.values()
        return next((named for named in known if named.core is core), None), core


def _can_think(core: EngineCore) -> bool:
    try:
        return bool(getattr(core.codec.chat_tokenizer, "has_thinking", False))
    except MlxNbError:
        return False


def _why(named: NamedEngine) -> str:
    try:
        default_session().get(named.name)
    except MlxNbError as error:
        return one_line(error)
    return ""


def _why_not(core: EngineCore) -> str:
    match core.state:
        case "failed":
            return f"the engine failed ({one_line(core.failure)}): call its launch() to start it again"
        case "closed":
            return "the engine is closed: make another panel, with an engine that runs"
        case "new":
            return "the engine is not started: call its launch()"
        case _:
            return "the engine is stopped: call its launch() to start it again"


def _command(named: NamedEngine | None) -> str | None:
    if named is None:
        return None
    closed = named.core.state == "closed"
    return named.again if closed else f"%mlx_engine restart {named.name}"
