"""What a subcommand of ``%mlx_engine`` waits for: blocking, or awaited by the cell. An interrupt ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from ..engine.core import EngineCore
from ..session.session import NamedEngine, Session
from .kernel import interrupts_raise
from .stream import interrupted
from .views import StatusLine

__all__ = ["Loading", "Pending", "Work", "starting"]

PROGRESS_S = 0.1

T = TypeVar("T")


class Pending(ABC):
    """Something to wait for."""

    @abstractmethod
    def wait(self) -> Any:
        """Block; the magic's value."""

    @abstractmethod
    async def wait_awaited(self) -> Any:
        """Await it; the magic's value."""


class Work(Pending):
    """A function that blocks for a while.

    Parameters
    ----------
    what : str
        For people: "warming 'default'".
    function : callable
        Called in this thread, or in another while the cell awaits.
    then : callable
        Gets its result; what it returns is the magic's value.
    """

    def __init__(self, what: str, function: Callable[[], T], then: Callable[[T], Any]) -> None:
        self._what = what
        self._function: Callable[[], Any] = function
        self._then: Callable[[Any], Any] = then

    def wait(self) -> Any:
        """Block."""
        with self._one_line(), interrupts_raise():
            result = self._function()
        return self._then(result)

    async def wait_awaited(self) -> Any:
        """Await it."""
        with self._one_line():
            result = await asyncio.to_thread(self._function)
        return self._then(result)

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise interrupted(f"{self._what} was interrupted") from None


class Loading(Pending):
    """An engine whose model loads, watched by a cell.

    Parameters
    ----------
    give_up : callable
        Called if the cell is interrupted or loading fails; what loads is discarded when it returns.
    """

    def __init__(self, shell: Any, engine: NamedEngine, give_up: Callable[[], None]) -> None:
        self._engine, self._give_up = engine, give_up
        self._line = StatusLine(shell)
        self._doing = "Loading" if engine.remote is None else "Connecting to"
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
            self._ended(error)
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
            self._ended(error)
        self._done()

    def _show(self) -> None:
        progress = self._engine.core.progress
        about = f": {progress.message}" if progress and progress.message else " …"
        part = f" ({progress.fraction:.0%})" if progress and progress.fraction is not None else ""
        self._line.show(f"{self._doing} {self._engine.model}{about}{part}")

    def _ended(self, error: BaseException) -> None:
        model = self._engine.model
        self._give_up()
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            self._line.show(f"{self._doing} {model} was interrupted")
            raise interrupted(
                f"{self._doing.lower()} {model} was interrupted; no engine was started"
            ) from None
        self._line.show(f"{self._doing} {model} failed")
        raise error

    def _done(self) -> None:
        info = self._engine.core.info
        about = [info.precision, info.backend]
        if info.context_length:
            about.append(f"{info.context_length:,} tokens of context")
        if info.weight_bytes:
            about.append(f"{info.weight_bytes / 1e6:,.0f} MB")
        if self._engine.remote is None:
            about.append(f"loaded in {time.monotonic() - self._began:.1f} s")
        elif self._engine.remote.key is not None:
            about.append(f"with the key from {self._engine.remote.key.source}")
        name = self._engine.name
        called = "" if name == "default" else f", called {name!r}"
        self._line.show(f"{info.name} is ready{called}: {', '.join(filter(None, about))}")


def starting(shell: Any, session: Session, engine: NamedEngine, before: NamedEngine | None) -> Loading:
    """Loading after which, if it fails, no trace of the engine stays and `before` is the current one again."""

    def give_up() -> None:
        if session.engines.get(engine.name) is engine:
            session.forget(engine.name)
            if before is not None and before.name in session.engines:
                session.use(before.name)

    return Loading(shell, engine, give_up)


def _wait_a_moment(core: EngineCore) -> None:
    try:
        core.wait_ready(PROGRESS_S)
    except TimeoutError:
        if core.state != "loading":  # the failure itself, not the end of our patience
            raise
