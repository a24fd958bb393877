"""Tab completion of the magics' lines: subcommands, options, engines, models, requests, variables.

It hangs one matcher into IPython's completer. File names are left to IPython's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from IPython.core.completer import (
    CompletionContext,
    SimpleCompletion,
    SimpleMatcherResult,
    context_matcher,
)

from ..session.conversation import conversations
from ..session.session import Session
from .arguments import Option, Options
from .engine_options import CACHE_ACTIONS, COMMANDS

__all__ = ["Completion"]

_LINE = re.compile(r"^\s*(?:[\w, ]+=\s*)?%(mlx_\w+)[ \t]+(.*)$")
_CELL = re.compile(r"^%%(mlx_\w+)\b[ \t]*(.*)$")
_OPEN_BRACES = re.compile(r"\{\{\s*(?:[^{}]*?[^\w.{}])?(\w*)$")
_NAMES_AN_ENGINE = {"use", "stop", "restart", "status", "stats", "requests", "warm", "monitor"}


@dataclass(frozen=True, slots=True)
class _Line:
    """A magic's line up to the cursor: whole words, and the one that is being typed."""

    words: list[str]
    typed: str

    @classmethod
    def of(cls, text: str) -> _Line:
        *words, typed = text.split(" ") if text else [""]
        return cls([word for word in words if word], typed)


class Completion:
    """Completes the lines of some magics.

    Parameters
    ----------
    magics : mapping of str to Options
        Those that take options before a prompt or a variable; ``%mlx_engine`` is known without.
    """

    def __init__(self, shell: Any, session: Session, magics: Mapping[str, Options]) -> None:
        self._shell, self._session, self._magics = shell, session, magics

        @context_matcher(identifier="mlx_nb")  # type: ignore[untyped-decorator, unused-ignore]
        def match(context: CompletionContext) -> SimpleMatcherResult:
            found, typed = self._find(context)
            return {
                "completions": [SimpleCompletion(text=text, type="magic") for text in found],
                "matched_fragment": typed,
                "suppress": bool(found),
            }

        self._match = match
        shell.Completer.custom_matchers.append(match)

    def remove(self) -> None:
        """Take the matcher out of the completer again."""
        self._shell.Completer.custom_matchers.remove(self._match)

    def _find(self, context: CompletionContext) -> tuple[list[str], str]:
        """What could be typed here, and the part of it that is there already."""
        before = context.text_until_cursor
        cell = _CELL.match(context.full_text.partition("\n")[0])
        line = _LINE.match(before)
        if cell is not None:
            name, rest = cell[1], cell[2]
            if context.cursor_line == 0:
                rest = before.partition(name)[2].removeprefix(" ")
        elif line is not None:
            name, rest = line[1], line[2]
        else:
            return [], ""
        if name != "mlx_engine" and (braces := _OPEN_BRACES.search(before)):
            return self._that_begin(braces[1], [*self._columns(name, rest), *self._variables()])
        if cell is not None and (context.cursor_line or before.endswith(name)):
            return [], ""
        typing = _Line.of(rest.lstrip())
        if name == "mlx_engine":
            return self._engine_line(typing)
        options = self._magics.get(name)
        return ([], "") if options is None else self._prompt_line(name, options, typing)

    def _engine_line(self, line: _Line) -> tuple[list[str], str]:
        if not line.words:
            return self._that_begin(line.typed, COMMANDS)
        command, *words = line.words
        options = COMMANDS.get(command)
        if options is None:
            return [], ""
        return self._option(options, words, line.typed) or self._that_begin(
            line.typed, self._words(command, _words_alone(options, words))
        )

    def _words(self, command: str, before: list[str]) -> Iterable[str]:
        """What may follow a subcommand and its words so far."""
        if command in _NAMES_AN_ENGINE and not before:
            return self._session.engines
        if command == "abort":
            return [i for i in self._requests() if i not in before]
        candidates: dict[tuple[str, int], Callable[[], Iterable[str]]] = {
            ("start", 0): _models,
            ("alias", 1): _models,
            ("cache", 0): lambda: CACHE_ACTIONS,
            ("help", 0): lambda: COMMANDS,
        }
        return candidates.get((command, len(before)), tuple)()

    def _prompt_line(self, name: str, options: Options, line: _Line) -> tuple[list[str], str]:
        found = self._option(options, line.words, line.typed)
        if found is not None:
            return found
        first: dict[str, Callable[[], Iterable[str]]] = {
            "mlx_batch": lambda: self._variables(_is_tabular),
            "mlx_chat": conversations,
        }
        if name not in first or _words_alone(options, line.words):
            return [], ""
        return self._that_begin(line.typed, first[name]())

    def _option(self, options: Options, words: list[str], typed: str) -> tuple[list[str], str] | None:
        """An option's name or value; None if something else is being typed."""
        flag, equals, value = typed.partition("=")
        if not equals and words:
            flag, value = words[-1], typed
        option = options.by_flag(flag) if equals or words else None
        if option is not None and option.value:
            value = value.rpartition(",")[2] if option.many else value  # --tools this,that
            return self._that_begin(value, self._values(option))
        if not typed.startswith("-"):
            return None
        given = {known.name for word in words if (known := options.by_flag(word)) and not known.many}
        flags = [flag for each in options.options if each.name not in given for flag in each.flags.split()]
        return self._that_begin(typed, flags)

    def _values(self, option: Option) -> Iterable[str]:
        if "|" in option.value:
            return option.value.split("|")
        candidates: dict[str, Callable[[], Iterable[str]]] = {
            "engine": lambda: self._session.engines,
            "out": self._variables,
            "schema": lambda: self._variables(lambda value: isinstance(value, type | dict)),
            "choices": lambda: self._variables(lambda value: isinstance(value, list | tuple)),
            "grammar": lambda: self._variables(lambda value: isinstance(value, str)),
            "logit_bias": lambda: self._variables(lambda value: isinstance(value, dict)),
            "tools": lambda: self._variables(callable),
            "image": lambda: self._variables(_is_picture),
            "video": lambda: self._variables(lambda value: isinstance(value, list | tuple)),
            "remove": _aliases,
        }
        return candidates.get(option.name, tuple)()

    def _variables(self, fits: Callable[[Any], bool] = lambda _: True) -> list[str]:
        hidden = self._shell.user_ns_hidden
        return [
            name
            for name, value in list(self._shell.user_ns.items())
            if not name.startswith("_") and hidden.get(name, self) is not value and fits(value)
        ]

    def _columns(self, name: str, line: str) -> list[str]:
        """The columns that a template of ``%%mlx_batch`` may name."""
        options = self._magics.get(name)
        if name != "mlx_batch" or options is None:
            return []
        data = [self._shell.user_ns.get(word) for word in _words_alone(options, line.split())]
        columns = getattr(data[0], "columns", ()) if data else ()
        return [column for column in columns if isinstance(column, str)]

    def _requests(self) -> list[str]:
        return [
            request["request_id"]
            for engine in self._session.engines.values()
            for request in engine.core.get_stats()["requests"]
        ]

    @staticmethod
    def _that_begin(typed: str, candidates: Iterable[str]) -> tuple[list[str], str]:
        return sorted({text for text in candidates if text.startswith(typed)}), typed


def _words_alone(options: Options, words: list[str]) -> list[str]:
    """The words that are neither options nor their values."""
    alone, value_follows = [], False
    for word in words:
        option = options.by_flag(word.partition("=")[0])
        if not value_follows and option is None and not word.startswith("-"):
            alone.append(word)
        value_follows = option is not None and bool(option.value) and "=" not in word
    return alone


def _models() -> list[str]:
    from ..session.models import model_names

    return model_names()


def _aliases() -> Iterable[str]:
    from ..backends.sources import aliases

    return aliases()


def _is_picture(value: Any) -> bool:
    """Whether it may be an image, told without importing what makes them."""
    if isinstance(value, type):
        return False
    shape = getattr(value, "shape", None)
    is_array = isinstance(shape, tuple) and len(shape) in (2, 3) and not _is_tabular(value)
    return (
        is_array
        or any(base.__module__ == "PIL.Image" for base in type(value).__mro__)
        or hasattr(value, "savefig")
    )


def _is_tabular(value: Any) -> bool:
    return type(value).__name__ in ("DataFrame", "Series")
