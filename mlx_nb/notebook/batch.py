"""``%%mlx_batch``: the cell is a template over the columns of a DataFrame."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class, no_var_expand

from .arguments import Option, Options, variable
from .magics import SAMPLING, STRUCTURE, sampling_fields, with_options
from .names import Names, one_of
from .stream import interrupted, one_line_errors

__all__ = ["BatchMagics", "arun_batch", "run_batch"]

OPTIONS = Options(
    "%%mlx_batch DATA [options]   DATA: a DataFrame, or a column of texts; the cell: a prompt with {{ column }}",
    Option("-o --out", "variable for the resulting DataFrame, which is shown otherwise", "NAME", variable),
    *SAMPLING,
    *STRUCTURE,
    Option("--col", "take an option's value from a column, as max_tokens=COLUMN", "OPTION=COLUMN", many=True),
    Option("--system", "system prompt; {{ column }} works here too", "TEXT"),
    Option("--images", "the column of each row's image, or list of images", "COLUMN"),
    Option("--raw", "leave the chat template out"),
    Option("--n", "this many answers a row", "N", int),
    Option("--shape", "of several answers: a row each, or columns each", "long|wide", one_of("long", "wide")),
    Option("--into", "give the data with the answers in this column", "NAME"),
    Option("--join", "give the data with all columns of the result; --into names the answers"),
    Option("--parsed", "with --schema, a column of the values themselves"),
    Option("--checkpoint", "a file that keeps the answers: the cell run again does what is missing", "FILE"),
    Option("--no-retry", "leave rows as they are that failed before"),
    Option("-e --engine", "which engine, if not the current one", "NAME"),
    Option("--model", "an engine that runs this model", "NAME"),
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
        kept = (
            "run the cell again to go on" if "checkpoint" in self.options else "--checkpoint FILE keeps them"
        )
        return interrupted(f"{self.out or '_'} holds {stopped.done:,} of {stopped.rows:,} rows: {kept}")


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
    return _Call(_evaluated(shell, expression), cell.strip(), _options(values, shell.user_ns), out)


def _options(given: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `generate_frame`."""
    from ..frames.options import col

    options = dict(given) | sampling_fields(given, Names(variables))
    for word in options.pop("col", ()):
        name, equals, column = word.partition("=")
        if not (name and equals and column):
            raise UsageError(f"--col takes OPTION=COLUMN, such as max_tokens=length, got {word!r}")
        name = name.strip("-").replace("-", "_")
        if name in options:
            raise UsageError(f"{name} is given twice")
        options[name] = col(column)
    if options.pop("no_retry", False):
        options["retry"] = False
    return options


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
