"""Magics that a cell awaits where it can.

IPython never awaits a magic. So while a kernel's loop runs, calls at the top level of a cell are rewritten to
await the magic's coroutine; the loop then goes on, for widgets and background tasks. Everywhere else (``%%time``,
``%%capture``, functions, the terminal) the magic is called as it is, and blocks.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from IPython.core.async_helpers import _asyncio_runner

from .kernel import in_kernel

__all__ = ["AwaitMagics", "RunningCells"]

_RUNNERS = {"run_line_magic": "line", "run_cell_magic": "cell"}


class RunningCells:
    """Which cells are executing, thread by thread (a subshell has its own)."""

    def __init__(self) -> None:
        self._running: dict[int, list[Any]] = {}
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()

    def __bool__(self) -> bool:
        return bool(self._running.get(threading.get_ident()))

    def begin(self, info: Any) -> None:
        """For the event pre_run_cell."""
        self._running.setdefault(threading.get_ident(), []).append(info)
        with contextlib.suppress(RuntimeError):  # no loop runs
            if (task := asyncio.current_task()) is not None:
                self._tasks.add(task)

    def end(self, result: Any) -> None:
        """For the event post_run_cell, which also comes for cells that never began."""
        thread = threading.get_ident()
        left = [info for info in self._running.pop(thread, ()) if result and info is not result.info]
        if left:
            self._running[thread] = left

    def outside(self) -> bool:
        """Whether the code that runs now was called by an event loop, in no cell's task."""
        try:
            return asyncio.current_task() not in self._tasks
        except RuntimeError:  # no loop runs
            return False


class AwaitMagics:
    """An input transformer that makes a cell await magics at its top level.

    ``get_ipython().run_cell_magic('name', …)`` becomes ``(await get_ipython().<door>('name', …))``.

    Parameters
    ----------
    names : collection of str
        Magics that have a coroutine.
    door : str
        Attribute path of the shell where the coroutine function is found.
    """

    def __init__(self, shell: Any, cells: RunningCells, names: Collection[str], door: str) -> None:
        self._shell, self._cells, self._names, self._door = shell, cells, names, door

    def __call__(self, lines: list[str]) -> list[str]:
        """Transform a cell that IPython has already turned into Python."""
        source = "".join(lines)
        if not any(runner in source for runner in _RUNNERS) or not self._can_await():
            return lines
        try:
            tree = ast.parse(source)
        except SyntaxError:  # IPython reports it
            return lines
        calls = [call for call in _magic_calls(tree) if self._knows(call)]
        return self._rewritten(source, calls).splitlines(keepends=True) if calls else lines

    def _can_await(self) -> bool:
        if not in_kernel(self._shell) or self._cells or not self._awaits_asyncio():
            return False
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    def _knows(self, call: ast.Call) -> bool:
        """Whether it is one of ours, called as what it is; IPython reports ``%name`` for a cell magic itself."""
        kind, name = _magic(call)
        return name in self._names and name in self._shell.magics_manager.magics[kind]

    def _awaits_asyncio(self) -> bool:
        return bool(self._shell.autoawait) and self._shell.loop_runner is _asyncio_runner

    def _rewritten(self, source: str, calls: list[ast.Call]) -> str:
        text = source.encode()
        begins = [0]
        for line in text.splitlines(keepends=True):
            begins.append(begins[-1] + len(line))

        def at(line: int | None, column: int | None) -> int:
            assert line is not None
            assert column is not None
            return begins[line - 1] + column

        for call in reversed(calls):  # from the end, so that earlier positions stay true
            begin, end = at(call.lineno, call.col_offset), at(call.end_lineno, call.end_col_offset)
            arguments = text[at(call.func.end_lineno, call.func.end_col_offset) : end]
            text = (
                text[:begin] + f"(await get_ipython().{self._door}".encode() + arguments + b")" + text[end:]
            )
        return text.decode()


def _magic_calls(node: ast.AST) -> Iterator[ast.Call]:
    """Calls as IPython writes them: a statement of their own, or the right side of an assignment."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, ast.Expr | ast.Assign) and isinstance(child.value, ast.Call):
            yield child.value
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _magic_calls(child)


def _magic(call: ast.Call) -> tuple[str, str | None]:
    """The kind and the name of the magic that is called; None for a call of anything else."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in _RUNNERS and call.args:
        name = call.args[0]
        if ast.unparse(call.func.value) == "get_ipython()" and isinstance(name, ast.Constant):
            return _RUNNERS[call.func.attr], str(name.value)
    return "line", None
