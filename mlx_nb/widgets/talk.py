"""A conversation as the chat panel leads it: settled turns, and at most one question on its way.

Owns what sending, stopping, regenerating and editing mean. A turn belongs to the conversation once it is answered, a
stopped one with the text that there is; what an edit or a regeneration replaces stays until then, so that a failure
loses nothing. Knows nothing of widgets; the conversation may be led from elsewhere at the same time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..engine.core import EngineCore
from ..errors import RequestError
from ..sampling import SamplingParams
from ..session.conversation import Conversation, Turn
from .asking import NO_FIGURES, Asking, Question
from .protocol import ChatFigures, ChatTurn

__all__ = ["Talk"]

END_S = 2.0
"""Seconds that `close` gives a question to end."""


@dataclass(frozen=True, slots=True)
class _Settled:
    """A turn of the conversation, and how it looks."""

    turn: Turn
    question: Question
    shown: ChatTurn


class Talk:
    """See the module. All of it may be used from any thread."""

    def __init__(self, conversation: Conversation, engine: Callable[[], EngineCore]) -> None:
        self.conversation = conversation
        self._engine = engine
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._settled: list[_Settled] = []
        self._asking: Asking | None = None
        self._at: int | None = None
        self._figures: ChatFigures = NO_FIGURES
        self._closed = False

    @property
    def live(self) -> bool:
        """Whether an answer is being written, or waited for."""
        asking = self._asking
        return asking is not None and asking.live

    def ask(self, question: Question, params: SamplingParams, replaces: str | None = None) -> None:
        """Send a question, in place of the turn of that key and those after it.

        Raises
        ------
        RequestError
            While an answer is being written, and for a question that says nothing.
        """
        if not question.text.strip() and not question.media:
            raise RequestError("the question is empty: write something")
        with self._lock:
            if self._closed:
                raise RequestError("the panel is closed: make another")
            if self.live:
                raise RequestError("an answer is being written: stop it first")
            self._align()
            at = None
            if replaces is not None:
                at, replaced = self._replaced(replaces)
                question = question if question.media else replace(replaced, text=question.text)
            before = Conversation(self.conversation.system, self.conversation.turns[:at])
            before.left_out = min(self.conversation.left_out, len(before.turns))
            self._at = at
            key = f"t{next(self._numbers)}"
            self._asking = Asking(key, question, before, self._engine, params, self._ended)
            self._asking.start()

    def regenerate(self, params: SamplingParams) -> None:
        """Ask the last question again, or the one that failed. RequestError if there is none."""
        with self._lock:
            self._align()
            asking = self._asking
            if asking is not None and not asking.live:
                self.ask(asking.question, params, asking.key)
            elif self._settled:
                last = self._settled[-1]
                self.ask(last.question, params, last.shown["key"])
            else:
                raise RequestError("there is nothing to answer again: ask something first")

    def stop(self) -> None:
        """End the answer with what there is of it."""
        asking = self._asking
        if asking is not None:
            asking.stop()
            asking.join(0.1)

    def dismiss(self) -> None:
        """Forget a question that has no answer; what it was to replace is there again."""
        with self._lock:
            if not self.live:
                self._asking = self._at = None

    def reset(self) -> None:
        """Stop, and forget all turns."""
        self.stop()
        with self._lock:
            self._asking = self._at = None
            self._figures = NO_FIGURES
            self.conversation.reset()

    def close(self) -> None:
        """Abort what is on its way. No question is taken after this."""
        with self._lock:
            self._closed, asking = True, self._asking
        if asking is not None:
            asking.stop()
            asking.join(END_S)

    def turns(self) -> list[ChatTurn]:
        """All turns as they look now; one that did not change is the same object as before."""
        with self._lock:
            self._align()
            asking = self._asking
            settled = [each.shown for each in self._settled]
            return settled if asking is None else [*settled[: self._at], asking.turn()]

    def figures(self) -> ChatFigures:
        """Of the last answer."""
        with self._lock:
            if self._asking is not None:
                self._figures = self._asking.figures()
            return self._figures

    def _ended(self, asking: Asking) -> None:
        """Take the answer into the conversation, unless nobody waits for it any more."""
        with self._lock:
            asking.live = False
            if asking is not self._asking or not asking.answered:
                return
            self._align()
            while self._at is not None and len(self.conversation.turns) > self._at:
                self.conversation.undo()
            shown = asking.turn()
            self.conversation.add(asking.question.text, shown["answer"], asking.question.media)
            self.conversation.left_out = asking.left_out
            turns = self.conversation.turns
            self._settled = [*self._settled[: len(turns) - 1], _Settled(turns[-1], asking.question, shown)]
            self._figures = asking.figures()
            self._asking = self._at = None

    def _replaced(self, key: str) -> tuple[int | None, Question]:
        """Where the turn of that key is in the conversation, None for behind its end, and what it asked."""
        asking = self._asking
        if asking is not None and asking.key == key:
            return self._at, asking.question
        for at, each in enumerate(self._settled):
            if each.shown["key"] == key:
                return at, each.question
        raise RequestError("this question is no longer part of the conversation")

    def _align(self) -> None:
        """Follow what others did to the conversation (lock held)."""
        known, turns = self._settled, self.conversation.turns
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0].turn is pair[1], zip(known, turns, strict=False)
            )
        )
        if same < len(known) or same < len(turns):
            self._settled = [*known[:same], *map(self._told, turns[same:])]
            if self._at is not None:
                self._at = min(self._at, len(turns))

    def _told(self, turn: Turn) -> _Settled:
        """A turn that this panel did not ask."""
        question = Question.about(turn.question, turn.media)
        shown: ChatTurn = {
            "key": f"t{next(self._numbers)}",
            "question": turn.question,
            "images": list(question.shown),
            "answer": turn.answer,
            "reasoning": "",
            "status": {"ending": "done", "problem": None, "thought_s": None, "left_out": 0},
        }
        return _Settled(turn, question, shown)
