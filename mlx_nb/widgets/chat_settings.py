"""The chat panel's drawer: system prompt and sampling, as typed and as they hold.

What isn't valid is said beside its field, in the words of `SamplingParams`, and the last valid value goes on to hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sampling import SamplingParams
from ..session.conversation import Conversation
from .protocol import ChatSettings

__all__ = ["Settings"]

_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")
_THINKING = {"": None, "on": True, "off": False}


class Settings:
    """Of one panel. `params` are those that hold for the next answer."""

    def __init__(self, params: SamplingParams, conversation: Conversation) -> None:
        self.params = params
        self._start = params
        self._conversation = conversation
        self._rejected: dict[str, str] = {}
        self._problems: dict[str, str] = {}

    def change(self, typed: Mapping[str, str]) -> None:
        """Take over what is valid. An empty field is the value that the panel began with."""
        for name, text in typed.items():
            if name == "system":
                self._conversation.system = text.strip() or None
            elif name in _NUMBERS or name == "thinking":
                self._rejected.pop(name, None)
                self._problems.pop(name, None)
                try:
                    self.params = self.params.but(**{name: self._value(name, text.strip())})
                except ValueError as error:
                    self._rejected[name], self._problems[name] = text, str(error)

    def shown(self) -> ChatSettings:
        """What stands in the fields, and what is wrong there."""
        thinking = next(text for text, value in _THINKING.items() if value is self.params.thinking)
        numbers = {name: _text(getattr(self.params, name)) for name in _NUMBERS}
        system = self._conversation.system or ""
        values = {"system": system, **numbers, "thinking": thinking, **self._rejected}
        return {"values": values, "problems": dict(self._problems)}

    def _value(self, name: str, text: str) -> Any:
        if name == "thinking":
            return _THINKING.get(text, text)
        if not text:
            return getattr(self._start, name)
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return text


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
