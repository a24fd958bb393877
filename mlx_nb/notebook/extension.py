"""Loading into a shell and leaving it again.

Owns what the extension hangs into IPython, and takes all of it out. Engines belong to the session: they outlive a
reload, and end with the cell that unloaded the extension for good.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets import TraitError
from traitlets.config import Config

from ..engine.interrupts import watch_cells
from ..session.session import default_session
from .awaiting import AwaitMagics, RunningCells
from .batch import OPTIONS as BATCH
from .batch import BatchMagics, arun_batch
from .chat import CHAT, ChatMagics
from .completion import Completion
from .displays import Displays
from .kernel import in_kernel, interrupts_wake
from .magics import GENERATE, MlxMagics
from .on_import import OnImport
from .questions import PromptLine
from .widget_outputs import WidgetOutputs

__all__ = ["Extension", "load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """For ``%load_ext mlx_nb``."""
    unload_ipython_extension(shell)
    shell.mlx_nb = Extension(shell)  # type: ignore[attr-defined]


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """For ``%unload_ext mlx_nb``."""
    extension = getattr(shell, "mlx_nb", None)
    if extension is not None:
        del shell.mlx_nb  # type: ignore[attr-defined]
        extension.leave()


class Extension:
    """What is loaded into one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: Any = shell
        self._magics = _magics(shell)
        self._chat = chat = ChatMagics(shell, self._magics)
        self._all_magics = (self._magics, BatchMagics(shell), chat)
        self._coroutines = self._magics.awaitable | {
            "mlx_batch": functools.partial(arun_batch, shell),
            "mlx_chat": chat.chat_awaited,
        }
        self._cells = RunningCells()
        self._awaiting = AwaitMagics(shell, self._cells, self._coroutines, "mlx_nb.awaited")
        shell.register_magics(*self._all_magics)
        shell.input_transformer_manager.token_transformers.append(PromptLine)
        shell.input_transformers_post.append(self._awaiting)
        self._events = {"pre_run_cell": self._begin, "post_run_cell": self._cells.end}
        for event, callback in self._events.items():
            shell.events.register(event, callback)
        if in_kernel(shell):
            watch_cells(self._cells.outside)
        self._accessors = [
            OnImport("pandas", _register_accessor),
            OnImport("dask.dataframe", _register_dask),
        ]
        self._displays = Displays(shell)
        self._widget_outputs = WidgetOutputs(shell)
        self._completion = Completion(
            shell, default_session(), {"mlx_generate": GENERATE, "mlx_batch": BATCH, "mlx_chat": CHAT}
        )

    def _begin(self, info: Any) -> None:
        self._cells.begin(info)
        if in_kernel(self._shell):
            interrupts_wake()

    async def awaited(self, name: str, *arguments: str) -> Any:
        """Await a magic; what `AwaitMagics` writes into cells."""
        interrupts_wake()  # the cell may be the one that loads the extension
        try:
            return await self._coroutines[name](*arguments)
        except KeyboardInterrupt:  # it stands for a cancellation, which has had its effect
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise

    def leave(self) -> None:
        """Take everything out of the shell again."""
        shell = self._shell
        watch_cells(None)
        for accessor in self._accessors:
            accessor.remove()
        self._completion.remove()
        self._displays.remove()
        self._widget_outputs.remove()
        for event, callback in self._events.items():
            shell.events.unregister(event, callback)
        shell.input_transformer_manager.token_transformers.remove(PromptLine)
        shell.input_transformers_post.remove(self._awaiting)
        for magics in self._all_magics:
            for kind, names in magics.magics.items():
                for name in names:
                    shell.magics_manager.magics[kind].pop(name, None)
            shell.magics_manager.registry.pop(type(magics).__name__, None)
            shell.configurables.remove(magics)
        self._magics.close()
        self._chat.close()
        shell.events.register("post_run_cell", _StopUnlessReloaded(shell))


class _StopUnlessReloaded:
    """At the end of the cell: stops the engines, unless the extension was loaded again by then (%reload_ext)."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __call__(self, _result: Any) -> None:
        self._shell.events.unregister("post_run_cell", self)
        if getattr(self._shell, "mlx_nb", None) is None:
            session = default_session()
            for name in session.engines:
                session.forget(name)


def _register_accessor() -> None:
    from ..frames import accessor  # noqa: F401 - importing it registers df.mlx


def _register_dask() -> None:
    from ..frames.accessor import register_dask

    register_dask()


def _magics(shell: InteractiveShell) -> MlxMagics:
    """The magics; settings that aren't valid are dropped, since they would break every load to come."""
    settings = shell.config.get("MlxMagics", Config())
    for name in list(settings):
        try:
            MlxMagics(config=Config({"MlxMagics": {name: settings[name]}}))
        except TraitError as error:
            sys.stderr.write(f"mlx_nb: MlxMagics.{name} = {settings[name]!r} is left out: {error}\n")
            del settings[name]
    return MlxMagics(shell)
