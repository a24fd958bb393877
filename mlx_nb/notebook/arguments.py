"""What stands on a magic's line: options, then words or a prompt.

Owns splitting, quoting and conversion. A prompt is never split: it is what follows the options, verbatim. What
can't be understood is refused in one line.
"""

from __future__ import annotations

import difflib
import keyword
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

__all__ = ["Option", "Options", "did_you_mean", "variable"]

_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\{\{.*?\}\}|[^\s"'])+""")
_QUOTED = re.compile(r""""((?:\\.|[^"\\])*)"|'([^']*)'""")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}
_FLAG = re.compile(r"--?[A-Za-z]")
_OF_IPYTHON = {"get_ipython", "In", "Out"}  # without them no magic works any more


def variable(text: str) -> str:
    """For options that name a variable: ValueError for what can't be one, or is IPython's own."""
    if not text.isidentifier() or keyword.iskeyword(text) or text in _OF_IPYTHON:
        raise ValueError(text)
    return text


_KINDS = {int: "a whole number", float: "a number", variable: "the name of a variable"}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a magic.

    Parameters
    ----------
    flags : str
        As typed, the long one last: "-n --max-tokens".
    help : str
    value : str
        What the value is called in the help, or the values there are as "this|that"; empty for a switch.
    convert : callable
        Text to value; its ValueError refuses the text.
    many : bool
        May be given several times; the values come as a list.
    """

    flags: str
    help: str
    value: str = ""
    convert: Callable[[str], Any] = str
    many: bool = False

    @property
    def name(self) -> str:
        """The key of its value: "max_tokens"."""
        return self.flags.split()[-1].lstrip("-").replace("-", "_")


class Options:
    """The options that one magic takes.

    Parameters
    ----------
    usage : str
        How the magic is typed.
    options : sequence of Option
    """

    def __init__(self, usage: str, *options: Option) -> None:
        self.usage = usage
        self.options = options
        self._by_flag = {flag: option for option in options for flag in option.flags.split()}

    @property
    def flags(self) -> list[str]:
        """All flags."""
        return list(self._by_flag)

    def by_flag(self, flag: str) -> Option | None:
        """The option of a flag."""
        return self._by_flag.get(flag)

    def help(self) -> str:
        """Usage and one line an option."""
        heads = [
            f"{', '.join(option.flags.split())} {option.value}{' …' if option.many else ''}".rstrip()
            for option in self.options
        ]
        width = max(map(len, heads), default=0)
        rows = [f"  {head:<{width}}  {option.help}" for head, option in zip(heads, self.options, strict=True)]
        return "\n".join([self.usage, *rows])

    def before_prompt(self, line: str, fill: Callable[[str], str] = str) -> tuple[dict[str, Any], str]:
        """Options at the line's beginning, and the rest as it is. ``--`` ends the options.

        Parameters
        ----------
        fill : callable
            Applied to each value before it is converted.
        """
        values: dict[str, Any] = {}
        rest = line.strip()
        while _FLAG.match(rest):
            rest = self._take(rest, values, fill)
        return values, rest[2:].lstrip() if re.match(r"--(\s|$)", rest) else rest

    def with_words(self, line: str) -> tuple[dict[str, Any], list[str]]:
        """Options anywhere on the line, and the other words, quotes resolved."""
        values: dict[str, Any] = {}
        words: list[str] = []
        rest = line.strip()
        while rest:
            if _FLAG.match(rest):
                rest = self._take(rest, values, str)
            else:
                word, rest = _split(rest)
                words.append(_unquoted(word))
        return values, words

    def _take(self, text: str, values: dict[str, Any], fill: Callable[[str], str]) -> str:
        """Move one option from the text to `values`; what remains."""
        word, rest = _split(text)
        flag, glued, value = word.partition("=")
        if flag not in self._by_flag and not flag.startswith("--") and flag[:2] in self._by_flag:
            flag, glued, value = word[:2], "=", word[2:]
        option = self._by_flag.get(flag)
        if option is None:
            raise UsageError(f"unknown option {flag}: {did_you_mean(flag, self._by_flag)}")
        if not option.value:
            if glued:
                raise UsageError(f"{flag} takes no value")
            self._put(option, flag, values, True)
            return rest
        if not glued:
            if not rest:
                raise UsageError(f"{flag} needs a value: {flag} {option.value}")
            value, rest = _split(rest)
        value = fill(_unquoted(value))
        try:
            self._put(option, flag, values, option.convert(value))
        except ValueError:
            kind = _KINDS.get(option.convert, option.value)
            raise UsageError(f"{flag} takes {kind}, got {value!r}") from None
        return rest

    @staticmethod
    def _put(option: Option, flag: str, values: dict[str, Any], value: object) -> None:
        if option.many:
            values.setdefault(option.name, []).append(value)
        elif option.name in values:
            raise UsageError(f"{flag} is given twice")
        else:
            values[option.name] = value


def did_you_mean(word: str, known: Collection[str]) -> str:
    """A hint for a mistyped word: an abbreviation, swapped letters, something close, or all there is."""
    likely = [
        *(name for name in known if len(word) > 2 and name.startswith(word)),
        *(name for name in known if sorted(name) == sorted(word)),
        *difflib.get_close_matches(word, known, n=1),
    ]
    return f"did you mean {likely[0]}?" if likely else f"known are {', '.join(known) or 'none'}"


def _split(text: str) -> tuple[str, str]:
    """The first word, and what follows it."""
    match = _WORD.match(text)
    if match is None or not (match.end() == len(text) or text[match.end()].isspace()):
        raise UsageError(f"a quote is not closed: {text}")
    return match.group(), text[match.end() :].lstrip()


def _unquoted(word: str) -> str:
    r"""Quotes resolved: single ones are literal; within double ones, \n \t \" and \\ mean what they do in Python."""

    def resolve(match: re.Match[str]) -> str:
        double, single = match.groups()
        if double is None:
            return str(single)
        return _ESCAPE.sub(lambda escape: _ESCAPES.get(escape[1], escape[0]), double)

    return _QUOTED.sub(resolve, word)
