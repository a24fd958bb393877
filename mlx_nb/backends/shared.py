"""Prompts at work that begin alike: who can go on from another's state, and who waits until it can.

Knows tokens and places, no arrays: the backend copies states, and says how far its rows have come. A prompt waits
only for one that came before it, and each of those in the batch goes on whatever happens: nobody waits for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..request import Request
from .keys import common

__all__ = ["Prompt", "Shared"]

LEAST = 16
"""Tokens that a prompt must get from another one: for fewer, one isn't worth the copy of a state."""
COPY_S = 0.0002
"""Seconds a layer that such a copy takes."""
TAIL = 64
"""Tokens of a prompt behind what others wait for, from which on it stops there; for fewer a pass takes as long."""


@dataclass(eq=False, slots=True)
class Prompt:
    """A request in the backend, with the tokens it had `made` before.

    The state of its first `done` tokens is there; it stops at the `cuts`, where its state is stored for others.
    While it waits, it is for the first `place` tokens of its `lead`; it has `waited` for so many already.
    """

    request: Request
    made: tuple[int, ...]
    key: list[int]
    number: int
    done: int = 0
    joined: bool = False
    cuts: set[int] = field(default_factory=set)
    lead: Prompt | None = None
    place: int = 0
    waited: int = 0


class Shared:
    """All prompts of a backend, in the order in which they came.

    Parameters
    ----------
    layers : int
        Of a state.
    trimmable : bool
        Whether a state can be cut back; one that can't is of use only at a cut.

    Attributes
    ----------
    least : int
        Tokens that a prompt must get from another one.
    """

    def __init__(self, layers: int, *, trimmable: bool) -> None:
        self.least = LEAST
        self._layers = layers
        self._trimmable = trimmable
        self._prompts: dict[str, Prompt] = {}
        self._waiting: dict[str, Prompt] = {}
        self._numbers = itertools.count()

    def add(
        self, request: Request, made: Sequence[int], key: list[int], boundaries: Iterable[int] = ()
    ) -> Prompt:
        """Take a prompt in that is told by `key`, and stops at the `boundaries` in any case."""
        prompt = Prompt(request, tuple(made), key, next(self._numbers), cuts=set(boundaries))
        self._prompts[request.request_id] = prompt
        return prompt

    def pace(self, speed: float) -> None:
        """Take note of the tokens that are prefilled in a second: the faster, the less a few of them are worth."""
        self.least = max(LEAST, int(speed * COPY_S * self._layers))

    def source(self, prompt: Prompt, covered: int) -> tuple[Prompt, int] | None:
        """A prompt whose state covers enough more than what is stored, and how many tokens."""
        if not self._trimmable:
            return None
        best = None
        for other in self._prompts.values():
            if other.joined and (place := self._common(prompt, other, other.done, covered)):
                best, covered = (other, place), place
        return best

    def wait(self, prompt: Prompt, covered: int) -> bool:
        """Have a prompt wait for one that will come to cover enough more, if there is any."""
        covered = max(covered, prompt.waited)  # it may have been evicted: don't wait for the same again
        for other in self._prompts.values():
            if not other.joined and other.number >= prompt.number:
                continue
            if place := self._common(prompt, other, len(other.key) - 1, covered):
                if not self._trimmable:
                    place = max(
                        (cut for cut in other.cuts if place - self.least < cut <= place), default=place
                    )
                if place > other.done and place >= covered + self.least:
                    prompt.lead, prompt.place, covered = other, place, place
        if prompt.lead is None:
            return False
        self._waiting[prompt.request.request_id] = prompt
        return True

    def cut(self, prompt: Prompt) -> bool:
        """Whether what a prompt waits for asks for one more cut of its lead, which is noted."""
        lead, place = prompt.lead, prompt.place
        assert lead is not None
        if self._trimmable:
            near = len(lead.key) - place < TAIL or any(place <= cut < place + TAIL for cut in lead.cuts)
        else:
            near = place in lead.cuts
        if not near:
            lead.cuts.add(place)
        return not near

    def ready(self) -> list[Prompt]:
        """Those that need wait no longer, in their order; they are waiting no more."""
        if not self._waiting:
            return []
        ready = [
            prompt
            for prompt in self._waiting.values()
            if prompt.lead is None
            or prompt.lead.done >= prompt.place
            or self._prompts.get(prompt.lead.request.request_id) is not prompt.lead
        ]
        for prompt in ready:
            del self._waiting[prompt.request.request_id]
            if prompt.lead is not None and prompt.lead.done >= prompt.place:
                prompt.waited = prompt.place
            prompt.lead = None
        return sorted(ready, key=lambda prompt: prompt.number)

    def leads(self, request_id: str) -> bool:
        """Whether others wait for it."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and any(other.lead is prompt for other in self._waiting.values())

    def remove(self, request_id: str) -> None:
        """Forget a prompt."""
        self._prompts.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def clear(self) -> list[str]:
        """Forget all; the ids of those that waited."""
        waiting = list(self._waiting)
        self._prompts.clear()
        self._waiting.clear()
        return waiting

    def _common(self, one: Prompt, two: Prompt, most: int, covered: int) -> int:
        """How many tokens two prompts share, up to `most`; 0 if that isn't enough beyond what is `covered`."""
        most = min(most, len(one.key) - 1)  # one must be left to feed
        good = covered + self.least
        if two is one or most < good or one.key[covered:good] != two.key[covered:good]:
            return 0  # soon: of those that share what is stored, most differ right behind it
        if one.key[:covered] != two.key[:covered]:
            return 0
        return min(most, common(one.key, two.key, good))
