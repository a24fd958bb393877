"""How a notebook shows answers and conversations of the Python API: as it shows those of the magics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..outputs import GenerationOutput
from ..session.conversation import Conversation
from .formats import Said, bundle, markdown

__all__ = ["Displays"]

MARKDOWN = "text/markdown"


class Displays:
    """Formatters in a shell, until `remove`."""

    def __init__(self, shell: Any) -> None:
        self._formatter = shell.display_formatter.formatters[MARKDOWN]
        shown: dict[type, Callable[[Any], str | None]] = {
            GenerationOutput: _answer,
            Conversation: _conversation,
        }
        self._types = list(shown)
        for kind, show in shown.items():
            self._formatter.for_type(kind, show)

    def remove(self) -> None:
        """Take the formatters out again."""
        for kind in self._types:
            self._formatter.pop(kind, None)


def _answer(output: GenerationOutput) -> str | None:
    return bundle(Said.of(output))[MARKDOWN] or None


def _conversation(talk: Conversation) -> str:
    said = [f"**{message['role']}**\n\n{markdown(message['content'])[MARKDOWN]}" for message in talk.messages]
    return "\n\n".join(said) or "*no turns yet*"
