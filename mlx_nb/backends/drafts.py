"""Where speculative decoding gets its guesses from.

A draft proposes how the tokens so far may go on; the target model checks all of it in one step, and keeps what it
would have said itself. So a draft decides how fast an answer comes, and never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from ..errors import ModelLoadError
from .rollback import cuts

__all__ = ["Draft", "ModelDraft", "PromptLookup", "Watcher"]

Weights = Any


class Draft(Protocol):
    """Guesses for one request at a time."""

    def begin(self) -> None:
        """Forget the last request."""

    def read(self, tokens: Sequence[int], most: int) -> bool:
        """Take in at most so many more of the `tokens` that the target has of a prompt; whether there were any."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens` (prompt and answer so far); none if there is no guess."""


@runtime_checkable
class Watcher(Draft, Protocol):
    """A draft that goes by what the target computes.

    Attributes
    ----------
    wants : dict
        What the target is asked for, as mlx-vlm's models are: see `Sighted.reveal`.
    """

    wants: dict[str, Any]

    def see(self, tokens: Sequence[int], hidden: mx.array, state: Sequence[Any]) -> None:
        """The target has read `tokens` and kept them: its hidden states at each, and its caches after them."""


class PromptLookup:
    """Goes on as the text did the last time it said the same (Saxena 2023, prompt lookup decoding).

    Parameters
    ----------
    longest, shortest : int
        Tokens of the end of the text that are looked for, the longest first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._seen: dict[tuple[int, ...], int] = {}
        self._read = 0

    def begin(self) -> None:
        """Forget the last request."""
        self._seen, self._read = {}, 0

    def read(self, tokens: Sequence[int], most: int) -> bool:  # noqa: ARG002 - Draft has it
        """Nothing: a lookup reads the text when it is asked."""
        return False

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """What followed the last earlier place with the same ending."""
        self._index(tokens)
        for size in self._sizes:
            place = self._seen.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if place is not None:
                return list(tokens[place : place + count])
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note what follows each n-gram that something follows; the latest place wins."""
        for end in range(self._read, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._seen[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)


class ModelDraft:
    """A smaller model with the same vocabulary, decoding greedily.

    Parameters
    ----------
    model
        As mlx-lm loads it.
    """

    def __init__(self, model: Weights) -> None:
        self._model = model
        self._state = make_prompt_cache(model)
        if not cuts(self._state):
            raise ModelLoadError("the draft model's cache can't be cut back: choose one with plain attention")
        self._fed: list[int] = []
        self._known = 0

    def begin(self) -> None:
        """Forget the last request."""
        self._state = make_prompt_cache(self._model)
        self._fed, self._known = [], 0

    def read(self, tokens: Sequence[int], most: int) -> bool:
        """Feed a chunk of the prompt, or of what the target had of it from before."""
        chunk = tokens[len(self._fed) : len(self._fed) + most]
        if not chunk:
            return False
        self._model(mx.array([chunk]), cache=self._state)
        mx.eval([c.state for c in self._state])
        self._fed += chunk
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` tokens this model would say."""
        # What was guessed last time and not kept is all there can be to take back.
        last = min(len(self._fed), len(tokens) - 1)
        same = next((i for i in range(self._known, last) if self._fed[i] != tokens[i]), last)
        self._known = same
        trim_prompt_cache(self._state, len(self._fed) - same)
        new = mx.array([tokens[same:]])
        guesses = []
        for _ in range(count):
            logits = self._model(new, cache=self._state)
            guess = mx.argmax(logits[:, -1, :], axis=-1)
            mx.async_eval(guess)  # type: ignore[no-untyped-call]
            guesses.append(guess)
            new = guess[None]
        made: list[int] = mx.concatenate(guesses).tolist() if guesses else []  # type: ignore[assignment]
        self._fed = [*tokens, *made[:-1]]
        return made
