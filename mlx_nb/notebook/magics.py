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
from ..validation import integer, number
from .arguments import Option, Options, variable
from .background import Background
from .engines import COMMANDS, EngineCommands
from .formats import FORMATS
from .images import MEDIA, attached
from .names import Names, one_of
from .stream import Ask, Count, Stream, one_line_errors

__all__ = ["GENERATE", "SAMPLING", "STRUCTURE", "MlxMagics", "read", "sampling_fields", "with_options"]

SAMPLING = (
    Option("-n --max-tokens", "most tokens to make", "N", int),
    Option("-t --temperature", "randomness; 0 always takes the likeliest token", "T", float),
    Option("--top-p", "draw from the likeliest tokens that hold this share (0 to 1)", "P", float),
    Option("--top-k", "draw from this many tokens; 0 means all", "K", int),
    Option("--min-p", "leave out tokens below this share of the likeliest one's", "P", float),
    Option("--seed", "same seed and prompt, same answer", "N", int),
    Option("--stop", "a text that ends the answer", "TEXT", many=True),
    Option("--stop-token-ids", "a token that ends the answer", "ID", int, many=True),
    Option("--ignore-eos", "go on until --max-tokens"),
    Option("--presence-penalty", "against tokens that are in the answer already (-2 to 2)", "X", float),
    Option("--frequency-penalty", "the same, each time they are (-2 to 2)", "X", float),
    Option("--repetition-penalty", "against repeating prompt and answer; 1 is none", "X", float),
    Option("--repetition-window", "last tokens that this looks at, instead of all", "N", int),
)
"""Each is a field of `SamplingParams`."""

STRUCTURE = (
    Option("--schema", "answer in JSON of this Pydantic class, dict, file or JSON schema", "NAME"),
    Option("--regex", "answer what matches this expression", "PATTERN"),
    Option("--choices", "answer one of these: a list's name, A,B,C, or repeat it", "A,B", many=True),
    Option("--grammar", "answer what this Lark grammar allows: a text's name, or a file", "NAME"),
)
"""Structured output, one of them at most; of the names in `SamplingParams`."""

_TOOLS = (
    Option("--tools", "functions that the model may call", "NAME,NAME", many=True),
    Option("--call", "carry the calls out, and go on with their results"),
    Option("--max-calls", "most calls that --call carries out (5)", "N", int),
)

GENERATE = Options(
    "%mlx_generate [options] prompt      or      %%mlx_generate [options], the prompt below",
    *SAMPLING,
    Option("--logit-bias", "added to tokens' logits: a dict's name, or {\"ID\": X}", "NAME"),
    Option(
        "--logprobs",
        "show each token's probability, with this many alternatives; see tokens_view()",
        "K",
        int,
    ),
    *MEDIA,
    *STRUCTURE,
    Option("--think", "have the model think first"),
    Option("--no-think", "have it answer without thinking"),
    *_TOOLS,
    Option("--n", "this many answers, as a list", "N", int),
    Option("--system", "what the model is told before the prompt", "TEXT"),
    Option("--raw", "give the prompt to the model as it is, without chat template"),
    Option("--literal", "leave {{ }} as they are"),
    Option(
        "-f --format", f"how to show the answer: {', '.join(FORMATS)}", "|".join(FORMATS), one_of(*FORMATS)
    ),
    Option("-q --quiet", "show nothing; the result is the value"),
    Option("--bg", "go on in the background; the value is a handle to await"),
    Option("--timeout", "give up after this many seconds", "S", float),
    Option("--count", "count the prompt's tokens instead"),
    Option("-e --engine", "the engine to ask, if not the current one", "NAME"),
    Option("-o --out", "put the result into this variable", "NAME", variable),
)

_MAX_CALLS = 5
_MOST_SAMPLES = 64
_DEFAULTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p")


def with_options(*options: Options) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
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
    @with_options(GENERATE)
    def mlx_generate(
        self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer a prompt.

        The answer streams into the cell and is its value: in ``_``, in ``Out``, or in the variable of ``-o``.
        ``{{ name }}`` stands for a variable; single braces are nothing special. Kernel > Interrupt ends the
        answer and keeps what there is of it.

        ``-i`` and ``--video`` show images and videos to a model that takes them. A word there means the variable of
        that name, or else a file or a URL; what was shown appears small above the answer.

        With ``--tools`` the model may call functions of the notebook, by their annotations and docstrings; with
        ``--call`` they are called. What the model writes is shown, and never run in the page.
        """
        job = self._job(line, cell, local_ns or {})
        return job.hand_over() if isinstance(job, Background) else job.run()

    async def generate_awaited(self, line: str, cell: str | None = None) -> Any:
        """`mlx_generate` for a cell that awaits it."""
        job = self._job(line, cell, {})
        return job.hand_over() if isinstance(job, Background) else await job.run_awaited()

    @no_var_expand
    @line_magic
    @with_options(*COMMANDS.values())
    def mlx_engine(self, line: str) -> Any:
        """Start, stop and look at engines."""
        return self._engines.run(line)

    async def engine_awaited(self, line: str) -> Any:
        """`mlx_engine` for a cell that awaits it."""
        return await self._engines.run_awaited(line)

    def _job(self, line: str, cell: str | None, local_ns: Mapping[str, Any]) -> Count | Stream | Background:
        """What a magic's line and cell ask for; refuses all that can be refused before the model is needed."""
        assert self.shell is not None
        names = ChainMap(dict(local_ns), self.shell.user_ns)
        with one_line_errors():
            given, rest, fill = read(GENERATE, line, names)
            prompt = fill(_prompt(rest, cell))
            if not prompt.strip():
                raise UsageError(
                    "the prompt is empty: write it in the cell, or after the options of the line"
                )
            ask = self.ask(prompt, given, Names(names))
        if given.get("count"):
            return Count(self.shell, ask)
        return Background(self.shell, ask) if given.get("bg") else Stream(self.shell, ask)

    def ask(self, prompt: str, given: Mapping[str, Any], names: Names) -> Ask:
        """What is asked with these options, and for the rest the defaults."""
        _check(given)
        defaults = {name: getattr(self, name) for name in _DEFAULTS}
        params = SamplingParams(**(defaults | sampling_fields(given, names)))
        samples = given.get("n")
        if samples is not None:
            integer("n", samples, low=1, high=_MOST_SAMPLES)
            if samples > 1 and params.greedy:
                raise UsageError("with temperature 0 all answers are the same: raise -t, or leave --n out")
        timeout = given.get("timeout")
        return Ask(
            core=default_session().get(given.get("engine")).core,
            prompt=prompt,
            params=params,
            system=given.get("system", self.system) or None,
            raw=given.get("raw", False),
            out=given.get("out"),
            style=given.get("format", "json" if params.schema is not None else "markdown"),
            by_token=params.logprobs is not None and "format" not in given,
            quiet=given.get("quiet", False),
            samples=samples,
            tools=names.tools(given["tools"]) if "tools" in given else None,
            max_calls=integer("max_calls", given.get("max_calls", _MAX_CALLS), low=1)
            if given.get("call")
            else 0,
            timeout=None if timeout is None else number("timeout", timeout, low=0),
            attached=attached(given, names),
        )


def read(
    options: Options, line: str, names: Mapping[str, Any]
) -> tuple[dict[str, Any], str, Callable[[str], str]]:
    """The options, what follows them, and how ``{{ }}`` are filled in there."""

    def fill(text: str) -> str:
        template = Template(text)
        template.require(names, kind="variable")
        return template.render(names)

    try:
        given, rest = options.before_prompt(line)
    except UsageError:  # a value may have to be filled in first; or it is refused again
        given = {}
    if given.get("literal"):
        return given, rest, str
    return *options.before_prompt(line, fill), fill


_APART = (
    ("think", "no_think"),
    ("n", "call"),
    ("raw", "tools"),
    ("raw", "think"),
    ("raw", "no_think"),
    ("raw", "image"),
    ("raw", "video"),
    *(("tools", option.name) for option in STRUCTURE),
)


def _check(given: Mapping[str, Any]) -> None:
    """Refuse options that don't go together."""

    def flag(name: str) -> str:
        return f"--{name.replace('_', '-')}"

    for one, other in _APART:
        if one in given and other in given:
            raise UsageError(f"{flag(one)} and {flag(other)} exclude each other: leave one out")
    for name, needed in (("call", "tools"), ("max_calls", "call")):
        if name in given and needed not in given:
            raise UsageError(f"{flag(name)} needs {flag(needed)}")
    if given.get("raw") and given.get("system"):
        raise UsageError("--system acts through the chat template: leave it out, or --raw")


def sampling_fields(given: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Fields of `SamplingParams` among the options."""
    fields = {option.name for option in SAMPLING} | {"logprobs", "regex"}
    sampling = {name: value for name, value in given.items() if name in fields}
    for name in ("schema", "grammar", "logit_bias", "choices"):
        if name in given:
            sampling[name] = getattr(names, name)(given[name])
    if "think" in given or "no_think" in given:
        sampling["thinking"] = "think" in given
    return sampling


def _prompt(rest: str, cell: str | None) -> str:
    if cell is None:
        return rest.removesuffix(";")  # IPython's habit for "no output", not part of the prompt
    if rest:
        raise UsageError(f"only options may follow %%mlx_generate, the prompt goes below it; found {rest!r}")
    return cell.strip("\n")
