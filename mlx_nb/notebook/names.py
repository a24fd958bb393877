"""What an option's word stands for: a variable or a file of the notebook, or the thing itself.

Every refusal is one line that says what the word could have been.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from ..session.tools import Tools

__all__ = ["Names", "one_of"]


class Names:
    """Looks words up.

    Parameters
    ----------
    variables : mapping
        Those of the notebook, and of the function that runs.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._variables = variables

    def schema(self, word: str) -> Any:
        """A variable (Pydantic class, dict, JSON text), a file, or JSON itself."""
        if word.lstrip().startswith("{"):
            return word
        return self._variable_or_file(word, "--schema", "a Pydantic class, a dict or a file")

    def grammar(self, word: str) -> str:
        """A variable that holds a text, a file, or a Lark grammar itself."""
        if ":" in word and not Path(word).is_file():
            return word
        found = self._variable_or_file(word, "--grammar", "a text or a file")
        if not isinstance(found, str):
            raise UsageError(f"--grammar takes a text or a file, and {word} is a {type(found).__name__}")
        return found

    def logit_bias(self, word: str) -> dict[int, float]:
        """A variable that holds a dict, or JSON: ``{"42": -5}``."""
        if word.lstrip().startswith("{"):
            try:
                found = json.loads(word)
            except ValueError as error:
                raise UsageError(f"--logit-bias is no JSON: {error}") from None
        else:
            found = self._variable(word, "--logit-bias", "a dict of token ids")
        if not isinstance(found, Mapping):
            raise UsageError(f"--logit-bias takes a dict of token ids, got {found!r}")
        try:
            return {int(token): bias for token, bias in found.items()}
        except (TypeError, ValueError):
            raise UsageError(f"--logit-bias takes a dict of token ids, got {found!r}") from None

    def choices(self, words: Sequence[str]) -> list[str]:
        """Each of several words as it is; one word is a list's name, or divided at its commas."""
        if len(words) > 1:
            return list(words)
        found = self._variables.get(words[0])
        if isinstance(found, list | tuple):
            return list(found)
        return [part.strip() for part in words[0].split(",") if part.strip()]

    def tools(self, words: Sequence[str]) -> Tools:
        """Functions, by names with commas between them."""
        names = [name.strip() for word in words for name in word.split(",") if name.strip()]
        functions = []
        for name in names:
            function = self._variable(name, "--tools", "a function")
            if not callable(function):
                raise UsageError(f"--tools takes functions, and {name} is a {type(function).__name__}")
            functions.append(function)
        if not functions:
            raise UsageError("--tools takes names of functions")
        return Tools(functions)

    def media(self, word: str, flag: str, kind: str) -> Any:
        """A variable's value if there is one of that name, else the word: a file or a URL."""
        if word in self._variables:
            return self._variables[word]
        if word.isidentifier() and not Path(word).exists():
            return self._variable(word, flag, f"{kind}: a variable, a file or a URL")
        return word

    def _variable(self, word: str, flag: str, kind: str) -> Any:
        """A variable's value; with dots, an attribute's."""
        first, *rest = word.split(".")
        if first not in self._variables:
            close = difflib.get_close_matches(first, self._variables, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"{flag} takes {kind}, and there is no {word!r}{hint}")
        value = self._variables[first]
        for name in rest:
            if not hasattr(value, name):
                raise UsageError(f"{flag} takes {kind}, and there is no {word!r}")
            value = getattr(value, name)
        return value

    def _variable_or_file(self, word: str, flag: str, kind: str) -> Any:
        path = Path(word).expanduser()
        if word in self._variables or not path.is_file():
            return self._variable(word, flag, kind)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"{flag} can't read {word}: {error}") from None


def one_of(*words: str) -> Callable[[str], str]:
    """For options that take one of a few words."""

    def convert(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return convert
