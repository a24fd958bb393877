"""A request as the engine holds it, and the states it goes through."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import SparsePrefill
from .errors import RequestError
from .sampling import SamplingParams

__all__ = ["Chat", "Media", "Piece", "Request", "RequestStatus"]


class RequestStatus(enum.Enum):
    """Where a request is in its life. Only the finished states are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self not in (RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED)

    def get_finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"abort"`` or ``"error"``; None while live."""
        return self.value if self.is_finished() else None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A picture of a prompt, or several that a model can only be shown together.

    Attributes
    ----------
    name : str
        Told by what is in it.
    places : list of int
        Where its tokens are in the prompt.
    tokens : list of int
        A prompt that has only this.
    arrays : mapping of str to numpy.ndarray
        Pixels, and what else the model wants to know of them.
    """

    name: str
    places: list[int]
    tokens: list[int]
    arrays: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """Pictures of a prompt, as a model's processor reads them.

    Attributes
    ----------
    tokens : list of int
        The prompt, as many tokens for each picture as the model has features of it.
    keys : list of int
        The same with a number below zero, told by the picture's content, for each token that stands for a picture.
    arrays : mapping of str to numpy.ndarray
        What positions depend on besides the tokens.
    pieces : sequence of Piece
        In the order of the prompt.
    last : int
        Tokens up to the last picture's end; what follows is plain text.
    """

    tokens: list[int]
    keys: list[int]
    arrays: Mapping[str, Any]
    pieces: Sequence[Piece]
    last: int


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as they were asked, for a server that applies the chat template itself.

    Contents are texts, or lists of parts; ``{"type": "image"}`` is the place of a picture.
    """

    messages: tuple[Mapping[str, Any], ...]

    def filled(self, pictures: Sequence[Any]) -> Chat:
        """With the pictures in their places, as ``{"type": "image", "image": picture}``.

        Raises
        ------
        RequestError
            When there are more places than pictures, or fewer.
        """
        places = sum(part.get("type") == "image" for message in self.messages for part in _parts(message))
        if places != len(pictures):
            raise RequestError(
                f"the messages have places for {places} images, and {len(pictures)} were given"
            )
        waiting = iter(pictures)
        return Chat(tuple(_filled(message, waiting) for message in self.messages))


def _parts(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if isinstance(content, str | None) else content


def _filled(message: Mapping[str, Any], pictures: Iterator[Any]) -> Mapping[str, Any]:
    if not (parts := _parts(message)):
        return message
    filled = [
        {**part, "image": next(pictures)} if part.get("type") == "image" else dict(part) for part in parts
    ]
    return {**message, "content": filled}


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and what is to be made of it. Fixed once submitted; the engine keeps progress elsewhere.

    Attributes
    ----------
    prompt_token_ids : list of int
    prefix_boundary : int
        Tokens of the prompt that later requests will share; the prefix cache checkpoints there.
    priority : int
        Lower goes first under the "priority" policy.
    seed : int
        The seed in use, drawn when the parameters name none.
    arrival : float
        ``time.monotonic()`` of submission.
    deadline : float, optional
        ``time.monotonic()`` at which it ends with TimeoutError.
    tools : sequence of dict, optional
        Schemas of the tools the prompt offers; some models' calls are read with them.
    preview : str
        First words of the prompt, for people.
    keep : bool
        Store its KV state for later prompts once it has ended.
    sparse_prefill : SparsePrefill, optional
        Prefill only what matters of a long prompt.
    media : Media, optional
        Its pictures; `prompt_token_ids` are then `media.tokens`.
    asked : str or Chat, optional
        The prompt for a server that has the tokenizer to itself; `prompt_token_ids` are then empty.
    whole : bool
        Nobody reads the answer before its end.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: float
    prefix_boundary: int = 0
    priority: int = 0
    deadline: float | None = None
    tools: Sequence[dict[str, Any]] | None = None
    preview: str = field(default="", repr=False)
    keep: bool = True
    sparse_prefill: SparsePrefill | None = None
    media: Media | None = field(default=None, repr=False)
    asked: str | Chat | None = field(default=None, repr=False)
    whole: bool = False

    def key(self, tokens: Sequence[int]) -> list[int]:
        """What the state that covers `tokens`, which begin the prompt or continue it, is kept under."""
        if self.media is None:
            return list(tokens)
        return [*self.media.keys[: len(tokens)], *tokens[len(self.media.keys) :]]
