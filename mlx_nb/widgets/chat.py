"""The chat panel: a small conversation in an output cell.

Owns the widget: its synced traits and what its buttons do. Its life is live.py's, the conversation is talk.py's, and
the drawing is js/src/chat's. Never waits for the engine, and keeps it alive only while it answers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import traitlets

from ..errors import MlxNbError, RequestError
from ..prompts.chat import Message
from ..sampling import SamplingParams
from ..session.conversation import Conversation
from ..session.conversation import conversation as conversation_named
from ..session.media import Media
from .asking import Question
from .chat_engine import ChatEngine, Engine
from .chat_settings import Settings
from .live import LiveWidget, asset
from .protocol import (
    Asked,
    ChatAction,
    ChatCommand,
    ChatHead,
    ChatSend,
    ChatSet,
    ChatTurn,
    ViewChange,
    parse_message,
)
from .readings import one_line
from .talk import Talk
from .talk_html import as_html, as_text
from .talk_wire import NOTHING_SAID, TalkWire

__all__ = ["ChatPanel"]

MAX_TOKENS = 1024
"""Tokens of an answer, if nothing else is asked for."""

_log = logging.getLogger(__name__)


class ChatPanel(LiveWidget):
    """A conversation in an output cell, with an engine of this process.

    Parameters
    ----------
    engine : str, AsyncEngineCore or EngineCore, optional
        Whom to ask: an engine by name, or itself (held weakly). The session's current one if none is given,
        whichever that is when a question is sent.
    conversation : str or Conversation, optional
        What to go on with; a name means the one that ``%%mlx_chat NAME`` leads. A new one if none is given.
    system : str, optional
        From now on the conversation's system message.
    params : SamplingParams, optional
        What the drawer begins with; answers have at most 1,024 tokens unless it says otherwise.
    **sampling
        Fields of `SamplingParams`, in place of those in `params`.

    Notes
    -----
    Answers are written while cells run. A turn belongs to the conversation once it is answered, a stopped one with
    the text that there is. `close` aborts an answer on its way and leaves a snapshot in the notebook.
    """

    _kind = "chat panel"
    _esm = asset("chat.js")
    _css = asset("chat.css")

    head = traitlets.Dict().tag(sync=True)
    talk = traitlets.Dict(dict(NOTHING_SAID)).tag(sync=True)
    figures = traitlets.Dict().tag(sync=True)
    settings = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        engine: Engine | None = None,
        conversation: str | Conversation | None = None,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> None:
        if isinstance(conversation, str):
            conversation = conversation_named(conversation)
        conversation = Conversation() if conversation is None else conversation
        if system is not None:
            conversation.system = system or None
        self._engine = ChatEngine(engine)
        self._settings = Settings(
            (params or SamplingParams(max_tokens=MAX_TOKENS)).but(**sampling), conversation
        )
        self._talk = Talk(conversation, self._engine.find)
        self._wire = TalkWire()
        self._new_view = False
        self._notice: str | None = None
        self._turns: Sequence[ChatTurn] = ()
        self._head: ChatHead | None = None
        self._leaving = weakref.finalize(self, self._talk.close)
        super().__init__()

    @property
    def conversation(self) -> Conversation:
        """What was said, to go on with elsewhere."""
        return self._talk.conversation

    @property
    def messages(self) -> list[Message]:
        """The conversation as messages, as `mlx_nb.generate` takes them."""
        return self.conversation.messages

    def close(self) -> None:
        """Abort an answer on its way, remove every view and end the threads. A snapshot stays in the notebook."""
        if hasattr(self, "_leaving"):  # else its arguments were refused, and there is nothing to close
            self._leaving()
            super().close()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """As of any widget; all of it has all turns, where the trait holds only what was sent last."""
        state: dict[str, Any] = super().get_state(key=key, drop_defaults=drop_defaults)
        if key is None:
            state["talk"] = self._wire.whole()
        return state

    def _receive(self, _widget: Any, content: Any, buffers: Any) -> None:
        match parse_message(content):
            case ViewChange(open=True):
                self._new_view = True
            case ChatSend(images=[_, *_]) as send:
                self._feed.ask(replace(send, data=tuple(map(bytes, buffers or ()))))
                return
        super()._receive(_widget, content, buffers)

    def _act(self, asked: Asked) -> None:
        try:
            match asked:
                case ChatSend(replaces=replaces):
                    self._talk.ask(self._question(asked), self._settings.params, replaces)
                case ChatSet(values=values):
                    self._settings.change(values)
                case ChatCommand(action=action):
                    self._press(action)
        except MlxNbError as error:
            self._notice = one_line(error)
        else:
            self._notice = None
        self._publish()

    def _question(self, send: ChatSend) -> Question:
        """What was sent; RequestError for what is no image, and for a model that takes none."""
        if not send.images:
            return Question(send.text)
        head = self._engine.head(busy=False, model="")
        if head["state"] == "idle" and not head["takes_images"]:
            raise RequestError("this model takes text only: leave images out")
        return Question.about(send.text, Media.of(list(send.data)), send.images)

    def _press(self, action: ChatAction) -> None:
        match action:
            case "stop":
                self._talk.stop()
            case "regenerate":
                self._talk.regenerate(self._settings.params)
            case "dismiss":
                self._talk.dismiss()
            case "reset":
                self._talk.reset()
            case "whole":
                self._new_view = True

    def _publish(self) -> None:
        with self.hold_sync():
            super()._publish()
            changes = self._wire.changes(self._turns)
            if self._new_view:
                self._new_view = False
                changes = self._wire.whole()
            if changes is not None:
                self.set_trait("talk", changes)

    def _read(self) -> Mapping[str, Any]:
        self._turns = self._talk.turns()
        before = self._head["model"] if self._head is not None else ""
        head = self._engine.head(busy=self._talk.live, model=before)
        self._head = head if self._notice is None else {**head, "problem": self._notice}
        return {"head": self._head, "figures": self._talk.figures(), "settings": self._settings.shown()}

    def _as_text(self) -> str:
        assert self._head is not None
        return as_text(self._head, self._turns)

    def _as_html(self) -> str:
        assert self._head is not None
        return as_html(self._head, self._turns)
