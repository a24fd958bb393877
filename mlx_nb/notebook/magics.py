"""The magics: what they are called, what their lines may say, and which defaults fill the gaps."""

from __future__ import annotations

import functools
import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)
from traitlets import Float, Int, TraitError, Unicode, validate

from ..prompts.template import Template
from ..sampling import SamplingParams
from ..session.session import default_session
from .arguments import Option, Options, variable
from .engines import COMMANDS, EngineCommands
from .stream import Ask, Stream, one_line_errors

__all__ = ["GENERATE", "SAMPLING", "MlxMagics"]

SAMPLING = (
    Option("-n --max-tokens", "most tokens to make", "N", int),
    Option("-t --temperature", "randomness; 0 always takes the likeliest token", "T", float),
    Option("--top-p", "draw from the likeliest tokens that hold this share (0 to 1)", "P", float),
    Option("--top-k", "draw from this many tokens; 0 means all", "K", int),
    Option("--min-p", "leave out tokens below this share of the likeliest one's", "P", float),
    Option("--seed", "same seed and prompt, same answer", "N", int),
    Option("--stop", "a text that ends the answer", "TEXT", many=True),
)
"""Each is a field of `SamplingParams`."""

GENERATE = Options(
    "%mlx_generate [options] prompt      or      %%mlx_generate [options], the prompt below",
    *SAMPLING,
    Option("--system", "what the model is told before the prompt", "TEXT"),
    Option("--raw", "give the prompt to the model as it is, without chat template"),
    Option("-e --engine", "the engine to ask, if not the current one", "NAME"),
    Option("-o --out", "put the result into this variable", "NAME", variable),
)

_DEFAULTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p")


def _with_options(*options: Options) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Append the options to a magic's docstring, for ``%magic?``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        texts = "\n".join(each.help() for each in options)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{texts}\n"
        return function

    return decorate


@magics_class
class MlxMagics(Magics):
    """Language models in the notebook. These are the defaults of %mlx_generate; set them with %config."""

    max_tokens = Int(256, help="most tokens of an answer").tag(config=True)
    temperature = Float(0.7, help="0 always takes the likeliest token").tag(config=True)
    top_p = Float(0.9, help="share of the likeliest tokens to draw from").tag(config=True)
    top_k = Int(0, help="number of tokens to draw from; 0 means all").tag(config=True)
    min_p = Float(0.0, help="least share of the likeliest token's probability").tag(config=True)
    system = Unicode("", help="what the model is told before each prompt").tag(config=True)

    @validate(*_DEFAULTS)
    def _in_range(self, proposal: Mapping[str, Any]) -> Any:
        try:
            SamplingParams().but(**{proposal["trait"].name: proposal["value"]})
        except ValueError as error:
            raise TraitError(str(error)) from None
        return proposal["value"]

    @functools.cached_property
    def _engines(self) -> EngineCommands:
        return EngineCommands(self.shell, default_session())

    @property
    def awaitable(self) -> dict[str, Callable[..., Any]]:
        """Coroutine functions for those magics that a cell may await."""
        return {"mlx_generate": self.generate_awaited, "mlx_engine": self.engine_awaited}

    def close(self) -> None:
        """End what the magics have opened."""
        self._engines.close()

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    @_with_options(GENERATE)
    def mlx_generate(
        self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a prompt.

        The answer streams into the cell and is its value: in ``_``, in ``Out``, or in the variable of ``-o``.
        ``{{ name }}`` stands for a variable; single braces are nothing special. Kernel > Interrupt ends the
        answer and keeps what there is of it.
        """
        return Stream(self.shell, self._ask(line, cell, local_ns or {})).run()

    async def generate_awaited(self, line: str, cell: str | None = None) -> Any:
        """`mlx_generate` for a cell that awaits it."""
        return await Stream(self.shell, self._ask(line, cell, {})).run_awaited()

    @no_var_expand
    @line_magic
    @_with_options(*COMMANDS.values())
    def mlx_engine(self, line: str) -> Any:
        """Start, stop and look at engines."""
        return self._engines.run(line)

    async def engine_awaited(self, line: str) -> Any:
        """`mlx_engine` for a cell that awaits it."""
        return await self._engines.run_awaited(line)

    def _ask(self, line: str, cell: str | None, local_ns: Mapping[str, Any]) -> Ask:
        """What a magic's line and cell ask for; refuses all that can be refused before the model is needed."""
        assert self.shell is not None
        names = ChainMap(dict(local_ns), self.shell.user_ns)

        def fill(text: str) -> str:
            template = Template(text)
            template.require(names, kind="variable")
            return template.render(names)

        with one_line_errors():
            given, rest = GENERATE.before_prompt(line, fill)
            prompt = fill(_prompt(rest, cell))
            if not prompt.strip():
                raise UsageError(
                    "the prompt is empty: write it in the cell, or after the options of the line"
                )
            if given.get("raw") and given.get("system"):
                raise UsageError("--system acts through the chat template: leave it out, or --raw")
            defaults = {name: getattr(self, name) for name in _DEFAULTS}
            sampling = {option.name: given[option.name] for option in SAMPLING if option.name in given}
            return Ask(
                core=default_session().get(given.get("engine")).core,
                prompt=prompt,
                params=SamplingParams(**(defaults | sampling)),
                system=given.get("system", self.system) or None,
                raw=given.get("raw", False),
                out=given.get("out"),
            )


def _prompt(rest: str, cell: str | None) -> str:
    if cell is None:
        return rest.removesuffix(";")  # IPython's habit for "no output", not part of the prompt
    if rest:
        raise UsageError(f"only options may follow %%mlx_generate, the prompt goes below it; found {rest!r}")
    return cell.strip("\n")
