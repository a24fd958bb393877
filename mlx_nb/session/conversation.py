"""Conversations: questions and answers so far, what of them fits into a model's context, and their files.

A conversation belongs to no engine: each turn may be asked of another one. It refuses nothing for its length; what
the context can't hold is left out of the prompt, oldest turns first, and stays in the conversation.
"""

from __future__ import annotations

import base64
import bisect
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine.core import EngineCore
from ..errors import MlxNbError
from ..prompts.chat import Message, chat_tokens, shared_tokens
from ..request import Chat
from .media import NO_MEDIA, Media, apart, as_text, length

if TYPE_CHECKING:
    from ..prompts.media import Picture

__all__ = ["Conversation", "Fitted", "Turn", "conversation", "conversations"]

FORMAT = "mlx_nb conversation"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, its answer, and the images and videos that the question is about."""

    question: str
    answer: str
    media: Media = NO_MEDIA


@dataclass(frozen=True, slots=True)
class Fitted:
    """A conversation with its next question, as tokens that leave room for the answer.

    Attributes
    ----------
    tokens : list of int or Chat
        All of it as messages where a server has the tokenizer.
    prefix_boundary : int
        Tokens that come before the question.
    left_out : int
        Oldest turns that the context has no room for.
    media : Media
        Images and videos of all turns that are in it, in order.
    """

    tokens: list[int] | Chat
    prefix_boundary: int
    left_out: int
    media: Media = NO_MEDIA


class Conversation:
    """Turns with one model or several.

    Parameters
    ----------
    system : str, optional
        What the model is told before the first turn; it is never left out.
    turns : iterable of Turn, optional

    Attributes
    ----------
    left_out : int
        Oldest turns that the last prompt had no room for.
    """

    def __init__(self, system: str | None = None, turns: Iterable[Turn] = ()) -> None:
        self.system = system
        self.left_out = 0
        self._turns = list(turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, oldest first."""
        return tuple(self._turns)

    @property
    def messages(self) -> list[Message]:
        """All of it as messages, the system message first. Images are parts of their questions."""
        return self._messages(self._turns)

    def fit(
        self,
        engine: EngineCore,
        question: str,
        *,
        max_tokens: int,
        thinking: bool | None = None,
        media: Media = NO_MEDIA,
    ) -> Fitted:
        """The prompt for the next question: the newest turns that fit.

        The answer gets room for `max_tokens`, but half of the context at most; where memory is scarcer than the
        context, it is the bound. When turns have to go, a quarter of what is left goes free with them: the next
        prompts then begin alike, and the prefix cache serves them.

        Raises
        ------
        RequestError
            When the model's chat template refuses the messages, or the model takes no images.
        """
        asked: Message = {"role": "user", "content": media.content(question)}

        def messages(left_out: int) -> tuple[list[Message], Media]:
            return apart([*self._messages(self._turns[left_out:]), asked])

        def tokens(left_out: int) -> list[int]:
            return chat_tokens(engine.codec, messages(left_out)[0], thinking=thinking)

        def size(left_out: int) -> int:
            return length(engine, tokens(left_out), messages(left_out)[1])

        sum((turn.media for turn in self._turns[self.left_out :]), media).check(engine)
        if engine.info.remote:
            self.left_out, (said, seen) = 0, messages(0)
            return Fitted(Chat(tuple(said)), 0, 0, seen)

        left_out, room = min(self.left_out, len(self._turns)), _room(engine, max_tokens)
        if room is not None and size(left_out) > room:
            fewer = range(left_out, len(self._turns))
            left_out += bisect.bisect_left(fewer, True, key=lambda k: size(k) <= room * 3 // 4)
        self.left_out, fitted = left_out, tokens(left_out)
        said, seen = messages(left_out)
        boundary = 0 if seen else shared_tokens(engine.codec, said, fitted, thinking=thinking)
        return Fitted(fitted, boundary, left_out, seen)

    def add(self, question: str, answer: str, media: Media = NO_MEDIA) -> None:
        """Append a turn."""
        self._turns.append(Turn(question, answer, media))

    def undo(self) -> Turn:
        """Take the last turn back; MlxNbError if there is none."""
        if not self._turns:
            raise MlxNbError("the conversation has no turn to undo")
        self.left_out = 0
        return self._turns.pop()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns.clear()
        self.left_out = 0

    def become(self, other: Conversation) -> None:
        """Take over all of another one."""
        self.system, self._turns, self.left_out = other.system, list(other.turns), 0

    def save(self, path: str | Path) -> None:
        """Write it as JSON, at once or not at all. MlxNbError if that can't be done."""
        saved = {
            "format": FORMAT,
            "version": VERSION,
            "messages": [_saved(message) for message in self.messages],
        }
        path = Path(path).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, json.dumps(saved, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise MlxNbError(f"can't save the conversation to {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Conversation:
        """The conversation in a file that `save` wrote; MlxNbError for any other file."""
        path = Path(path).expanduser()
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MlxNbError(f"can't read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise MlxNbError(f"{path} is damaged ({error}): save the conversation again") from error
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise MlxNbError(f"{path} holds no conversation: give a file that a conversation was saved to")
        if saved.get("version") != VERSION:
            raise MlxNbError(
                f"{path} has version {saved.get('version')!r} of the format and this mlx_nb reads {VERSION}: "
                "update mlx_nb"
            )
        try:
            return cls(*_read(saved["messages"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MlxNbError(f"{path} is damaged ({_what(error)}): save the conversation again") from error

    def _messages(self, turns: Iterable[Turn]) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages.append({"role": "user", "content": turn.media.content(turn.question)})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def __repr__(self) -> str:
        count = len(self._turns)
        return f"<Conversation of {'1 turn' if count == 1 else f'{count} turns'}>"

    def __str__(self) -> str:
        """All of it, to read."""
        return "\n\n".join(f"{message['role']}: {as_text(message['content'])}" for message in self.messages)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002 - IPython gives it
        printer.text(str(self) or repr(self))


_named: dict[str, Conversation] = {}


def conversation(name: str = "default") -> Conversation:
    """The conversation of this name, which magics and `chat` share; a new one if there is none yet."""
    return _named.setdefault(name, Conversation())


def conversations() -> list[str]:
    """The names that conversations have so far."""
    return list(_named)


def _room(engine: EngineCore, max_tokens: int) -> int | None:
    """Tokens that a prompt may have; None for any number."""
    context, most = engine.max_context, engine.max_in_memory
    if most is not None and (context is None or most < context):
        return most - max_tokens
    return None if context is None else context - min(max_tokens, context // 2)


def _saved(message: Message) -> Message:
    """A message for a file: pictures as PNG."""
    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": [*map(_saved_part, content)]}


def _saved_part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part:
        case {"type": "image", "image": picture}:
            return {"type": "image", "image": _as_url(picture)}
        case {"type": "video", "video": clip}:
            return {"type": "video", "frames": [*map(_as_url, clip.frames)], "fps": clip.fps}
    return dict(part)


def _as_url(picture: Picture) -> str:
    png = picture.thumbnail_png(max(picture.width, picture.height))
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _read(messages: Any) -> tuple[str | None, list[Turn]]:
    """System message and turns; ValueError for messages that are no conversation of ours."""
    said = [(str(message["role"]), *_read_content(message["content"])) for message in messages]
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    if [role for role, *_ in said] != ["user", "assistant"] * (len(said) // 2):
        raise ValueError("questions and answers don't alternate")
    pairs = zip(said[::2], said[1::2], strict=True)
    return system, [Turn(question, answer, media) for (_, question, media), (_, answer, _) in pairs]


def _read_content(content: Any) -> tuple[str, Media]:
    """A message's text and media. A file names no other files and no addresses: its pictures are in it."""
    if isinstance(content, str):
        return content, NO_MEDIA
    if not isinstance(content, list):
        raise ValueError("a message is no text")
    texts, images, videos = [], [], []
    for part in content:
        match part:
            case {"type": "text", "text": str() as text}:
                texts.append(text)
            case {"type": "image", "image": str() as url} if url.startswith("data:"):
                images.append(url)
            case {"type": "video", "frames": [*urls], "fps": float() | int() as fps} if all(
                isinstance(url, str) and url.startswith("data:") for url in urls
            ):
                from ..prompts.media import load_video

                videos.append(load_video(urls, fps=fps))
            case _:
                raise ValueError("a message has a part of no known kind")
    return "".join(texts), Media.of(images or None, videos or None)


def _what(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _write(path: Path, text: str) -> None:
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink()
        raise
