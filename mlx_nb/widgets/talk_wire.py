"""Turns to what is sent of them: only those that are new or changed, and of one that grew only its growth."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .protocol import ChatTalk, ChatTurn, TurnGrowth

__all__ = ["NOTHING_SAID", "TalkWire"]

NOTHING_SAID: ChatTalk = {"base": 0, "revision": 0, "keys": [], "turns": [], "grown": []}


class TalkWire:
    """What the views have been told. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, ChatTurn] = {}
        self._revision = 0

    def changes(self, turns: Sequence[ChatTurn]) -> ChatTalk | None:
        """What to send now that the turns are these; None when nothing changed."""
        with self._lock:
            new: list[ChatTurn] = []
            grown: list[TurnGrowth] = []
            for turn in turns:
                told = self._told.get(turn["key"])
                if told is turn or told == turn:
                    continue
                growth = None if told is None else _growth(told, turn)
                new.extend([turn] if growth is None else [])
                grown.extend([] if growth is None else [growth])
            keys = [turn["key"] for turn in turns]
            if not new and not grown and keys == list(self._told):
                return None
            self._told = {turn["key"]: turn for turn in turns}
            base, self._revision = self._revision, self._revision + 1
            # Nothing was told before: this is everything.
            return {"base": base, "revision": self._revision, "keys": keys, "turns": new, "grown": grown}

    def whole(self) -> ChatTalk:
        """All that has been told, for a view that begins."""
        with self._lock:
            return {
                "base": 0,
                "revision": self._revision,
                "keys": list(self._told),
                "turns": list(self._told.values()),
                "grown": [],
            }


def _growth(told: ChatTurn, turn: ChatTurn) -> TurnGrowth | None:
    """From one to the other, if the latter's texts begin with the former's."""
    if told["question"] != turn["question"] or told["images"] != turn["images"]:
        return None
    answer, reasoning = (turn["answer"], told["answer"]), (turn["reasoning"], told["reasoning"])
    if not answer[0].startswith(answer[1]) or not reasoning[0].startswith(reasoning[1]):
        return None
    return {
        "key": turn["key"],
        "answer": answer[0][len(answer[1]) :],
        "reasoning": reasoning[0][len(reasoning[1]) :],
        "status": turn["status"],
    }
