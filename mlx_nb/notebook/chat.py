"""``%%mlx_chat``: a conversation, a question a cell.

A turn belongs to the conversation once it is answered; an interrupted one with the text that there is, if any. What a
line asks for is done in this order: load, reset, undo, the question, save, show, panel.
"""

from __future__ import annotations

import sys
import weakref
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, needs_local_scope, no_var_expand

from ..session.conversation import Conversation, conversation
from .arguments import Option, Options
from .kernel import in_kernel
from .magics import GENERATE, MlxMagics, read, with_options
from .names import Names
from .stream import Ask, Stream, one_line_errors
from .views import place

__all__ = ["CHAT", "ChatMagics"]

_NOT_HERE = {"raw", "n", "tools", "call", "max_calls", "bg", "count", "system"}
_ACTIONS = (
    Option("--undo", "take the last turn back"),
    Option("--reset", "forget all turns"),
    Option("--load", "go on from a saved conversation", "FILE"),
    Option("--save", "save the conversation", "FILE"),
    Option("--show", "show the conversation"),
    Option("--panel", "go on with it in a panel below the cell"),
)
CHAT = Options(
    "%%mlx_chat [NAME] [options], the question below      or      %mlx_chat [NAME] --show, --undo, …",
    *_ACTIONS,
    Option("--system", "what the model is told before the first turn, from now on", "TEXT"),
    *(option for option in GENERATE.options if option.name not in _NOT_HERE),
)
_WITHOUT_QUESTION = {option.name for option in _ACTIONS} | {"system", "literal"}


@magics_class
class ChatMagics(Magics):
    """The magic; its defaults are those of %mlx_generate."""

    def __init__(self, shell: Any, magics: MlxMagics) -> None:
        super().__init__(shell)
        self._magics = magics
        self._panels: weakref.WeakSet[Any] = weakref.WeakSet()

    def close(self) -> None:
        """Close the panels that were shown."""
        for panel in list(self._panels):
            panel.close()

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    @with_options(CHAT)
    def mlx_chat(self, line: str, cell: str | None = None, local_ns: Mapping[str, Any] | None = None) -> Any:
        """Ask the next question of a conversation, or look after one. There is one for each NAME.

        The model is told the earlier turns as well, with their images. Those that its context has no room for are
        left out, oldest first, and the line under the answer says how many.
        """
        call = self._call(line, cell, local_ns or {})
        call.before()
        result = Stream(self.shell, call.ask).run() if call.ask else None
        self._after(call)
        return result

    async def chat_awaited(self, line: str, cell: str | None = None) -> Any:
        """`mlx_chat` for a cell that awaits it."""
        call = self._call(line, cell, {})
        call.before()
        result = await Stream(self.shell, call.ask).run_awaited() if call.ask else None
        self._after(call)
        return result

    def _after(self, call: _Call) -> None:
        call.after()
        if "panel" in call.given:
            from ..widgets import ChatPanel

            panel = ChatPanel(call.given.get("engine"), call.talk)
            self._panels.add(panel)
            place(panel)

    def _call(self, line: str, cell: str | None, local_ns: Mapping[str, Any]) -> _Call:
        """A line and a cell, understood; nothing has been done yet."""
        assert self.shell is not None
        names = ChainMap(dict(local_ns), self.shell.user_ns)
        with one_line_errors():
            name, line = _name_first(line.strip().removesuffix(";").rstrip())
            given, rest, fill = read(CHAT, line, names)
            words = [word for word in (name, rest) if word]
            if len(words) > 1 or " " in rest:
                raise UsageError(f"a conversation has one name, got {' '.join(words)!r}")
            if "load" in given and ("reset" in given or "undo" in given):
                extra = "reset" if "reset" in given else "undo"
                raise UsageError(f"--load brings other turns: leave --{extra} out")
            if "reset" in given and "undo" in given:
                raise UsageError("--reset forgets the last turn as well: leave --undo out")
            if "panel" in given and not in_kernel(self.shell):
                raise UsageError("the panel needs a notebook; %%mlx_chat works here")
            talk = conversation(*words)
            question = fill(cell.strip("\n")) if cell else ""
            if question.strip():
                ask = self._magics.ask(question, given, Names(names))
                return _Call(talk, given, replace(ask, system=None, conversation=talk), self._magics.system)
            if not given:
                raise UsageError(
                    "the question goes into the cell below %%mlx_chat; a line takes --show, --undo, --reset, "
                    "--load, --save, --panel or --system"
                )
            for option in given:
                if option not in _WITHOUT_QUESTION and not (option == "engine" and "panel" in given):
                    raise UsageError(
                        f"--{option.replace('_', '-')} goes with a question, in the cell below %%mlx_chat"
                    )
            return _Call(talk, given, None, "")


@dataclass(frozen=True, slots=True)
class _Call:
    """What is to be done with a conversation, and what it is asked."""

    talk: Conversation
    given: dict[str, Any]
    ask: Ask | None
    default_system: str

    def before(self) -> None:
        """Do what comes before the question."""
        talk, given = self.talk, self.given
        with one_line_errors():
            if "load" in given:
                talk.become(Conversation.load(given["load"]))
                _say(f"{_turns(talk)} loaded from {given['load']}")
            if "reset" in given:
                _say(f"{_turns(talk)} forgotten")
                talk.reset()
            if "undo" in given:
                _say(f"taken back: {_short(talk.undo().question)}")
            if "system" in given:
                talk.system = given["system"] or None
            elif self.ask and talk.system is None and not talk.turns:
                talk.system = self.default_system or None

    def after(self) -> None:
        """Do what comes after it."""
        with one_line_errors():
            if "save" in self.given:
                self.talk.save(self.given["save"])
                _say(f"{_turns(self.talk)} saved to {self.given['save']}")
            if "show" in self.given:
                place(self.talk)


def _name_first(line: str) -> tuple[str, str]:
    if line.startswith("-"):
        return "", line
    name, _, rest = line.partition(" ")
    return name, rest


def _turns(talk: Conversation) -> str:
    count = len(talk.turns)
    return "1 turn" if count == 1 else f"{count:,} turns"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
