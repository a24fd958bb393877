"""``%%mlx_batch``: the cell is a template over the columns of a DataFrame."""

from __future__ import annotations

import asyncio
import difflib
import re
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand

from .arguments import Option, Options, variable
from .magics import SAMPLING, with_options
from .stream import interrupted, one_line_errors

__all__ = ["BatchMagics", "arun_batch", "run_batch"]

OPTIONS = Options(
    "%%mlx_batch DATA [options]   DATA: a DataFrame, or a column of texts; the cell: a prompt with {{ column }}",
    Option("-o --out", "variable for the resulting DataFrame, which is shown otherwise", "NAME", variable),
    *SAMPLING,
    Option("--system", "system prompt", "TEXT"),
    Option("--raw", "leave the chat template out"),
    Option("-e --engine", "which engine, if not the current one", "NAME"),
)

_FIRST_OPTION = re.compile(r"(?:^|\s)(?=--?[A-Za-z])")


@magics_class
class BatchMagics(Magics):
    """The magic as a kernel or a terminal calls it."""

    @no_var_expand
    @cell_magic
    @with_options(OPTIONS)
    def mlx_batch(self, line: str, cell: str) -> Any:
        """Run the cell as a prompt over every row of a DataFrame."""
        return run_batch(self.shell, line, cell)


@dataclass(frozen=True, slots=True)
class _Call:
    """A magic's line and cell, understood."""

    data: Any
    template: str
    options: dict[str, Any]
    out: str | None

    def deliver(self, shell: Any, frame: Any) -> Any:
        """The frame, into the variable or as the cell's value."""
        if self.out is None:
            return frame
        shell.push({self.out: frame})
        return None

    def cut_short(self, shell: Any, stopped: Any) -> BaseException:
        """Deliver what there is; what to raise, so that the cell ends as interrupted."""
        if self.deliver(shell, stopped.partial) is not None:
            shell.displayhook.update_user_ns(stopped.partial)
        return interrupted(f"{self.out or '_'} holds {stopped.done:,} of {stopped.rows:,} rows")


def run_batch(shell: Any, line: str, cell: str) -> Any:
    """The magic, blocking. Returns the DataFrame, or None if it went into a variable.

    An interrupt delivers what is finished.

    Raises
    ------
    UsageError
        For anything that keeps it from beginning, in one line.
    """
    from ..frames.generate import generate_frame
    from ..frames.results import GenerationCancelled, GenerationInterrupted

    with one_line_errors():
        call = _parse(shell, line, cell)
        try:
            frame = generate_frame(call.data, call.template, **call.options)
        except (GenerationInterrupted, GenerationCancelled) as stopped:
            raise call.cut_short(shell, stopped) from None
        return call.deliver(shell, frame)


async def arun_batch(shell: Any, line: str, cell: str) -> Any:
    """`run_batch` for a cell that awaits."""
    from ..frames.generate import agenerate_frame
    from ..frames.results import GenerationCancelled

    with one_line_errors():
        call = _parse(shell, line, cell)
        try:
            frame = await agenerate_frame(call.data, call.template, **call.options)
        except GenerationCancelled as cancelled:
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            raise call.cut_short(shell, cancelled) from None
        return call.deliver(shell, frame)


def _parse(shell: Any, line: str, cell: str) -> _Call:
    begin = _FIRST_OPTION.search(line)
    data, rest = (line[: begin.start()], line[begin.start() :]) if begin else (line, "")
    values, after = OPTIONS.before_prompt(rest)
    expression = " ".join(part for part in (data.strip(), after.strip()) if part)
    out = values.pop("out", None)
    return _Call(_evaluated(shell, expression), cell.strip(), values, out)


def _evaluated(shell: Any, expression: str) -> Any:
    if not expression:
        raise UsageError("%%mlx_batch needs a DataFrame: %%mlx_batch df -o result")
    try:
        return shell.ev(expression)
    except NameError as error:
        close = difflib.get_close_matches(error.name or expression, shell.user_ns, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"there is no variable {error.name!r}{hint}") from None
    except Exception as error:
        raise UsageError(f"{expression}: {type(error).__name__}: {error}") from None
