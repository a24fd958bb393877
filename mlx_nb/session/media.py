"""Pictures and clips that go with a prompt: taken in, put into messages, and refused where the model takes none.

In a message they are parts of its content, before the text: ``{"type": "image", "image": Picture}``. A model's chat
template sees the bare part; the pictures go to the engine beside the tokens, in the order of the parts. What servers
are sent means the same: ``{"type": "image_url", "image_url": {"url": …}}``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..errors import RequestError
from ..prompts.chat import Message
from ..request import Chat

if TYPE_CHECKING:
    from ..prompts.media import Clip, Picture

__all__ = ["NO_MEDIA", "Media", "apart", "as_text", "check_images", "length", "taken_in", "with_media"]


@dataclass(frozen=True, slots=True)
class Media:
    """What goes with a prompt besides its text."""

    pictures: tuple[Picture, ...] = ()
    clips: tuple[Clip, ...] = ()

    @classmethod
    def of(cls, images: Any = None, videos: Any = None) -> Media:
        """Take in one source or a list of them, of anything that `load_image` and `load_video` take.

        A list of frames is one video in a list: ``videos=[frames]``.
        """
        if images is None and videos is None:
            return NO_MEDIA
        from ..prompts.media import load_images, load_video

        several = videos if isinstance(videos, list | tuple) else [] if videos is None else [videos]
        return cls(tuple(load_images(images)), tuple(load_video(video) for video in several))

    def __bool__(self) -> bool:
        return bool(self.pictures or self.clips)

    def __add__(self, other: Media) -> Media:
        return Media(self.pictures + other.pictures, self.clips + other.clips)

    def check(self, core: EngineCore) -> None:
        """RequestError for a model that takes none of it. The model must be there."""
        if self.pictures:
            check_images(core)
        if self.clips and not core.info.takes_videos:
            raise _takes_none(core, "videos")

    def content(self, text: str) -> str | list[dict[str, Any]]:
        """The content of a message: its text, or parts."""
        if not self:
            return text
        return [
            *({"type": "image", "image": picture} for picture in self.pictures),
            *({"type": "video", "video": clip} for clip in self.clips),
            {"type": "text", "text": text},
        ]

    def options(self) -> dict[str, Any]:
        """Arguments of `EngineCore.submit`."""
        return {"images": list(self.pictures) or None, "videos": list(self.clips) or None}


NO_MEDIA = Media()


async def taken_in(images: Any, videos: Any) -> Media:
    """`Media.of`; a download must not hold up the loop."""
    if images is None and videos is None:
        return NO_MEDIA
    return await asyncio.to_thread(Media.of, images, videos)


def check_images(core: EngineCore) -> None:
    """RequestError for a model that takes no images. It must be there."""
    if not core.info.takes_images:
        raise _takes_none(core, "images")


def _takes_none(core: EngineCore, what: str) -> RequestError:
    name, taken = core.info.name or "this model", "text and images" if core.info.takes_images else "text"
    return RequestError(f"{name} takes {taken} only: leave {what} out, or start a model that takes {what}")


def with_media(messages: Sequence[Message], media: Media) -> list[Message]:
    """The messages with the media in their bare parts, ``{"type": "image"}``; without such in the last question.

    Raises
    ------
    RequestError
        For media that have no place, and for places that have no media.
    """
    messages = list(messages)
    waiting: dict[Any, list[Any]] = {"image": list(media.pictures), "video": list(media.clips)}
    if media and not any(_is_bare(part) for message in messages for part in _parts(message)):
        return _in_last_question(messages, media)
    for at, message in enumerate(messages):
        parts = _parts(message)
        for i, part in enumerate(parts):
            if _is_bare(part):
                kind = part["type"]
                if not waiting[kind]:
                    raise RequestError(f"the messages have more places for {kind}s than were given")
                parts[i] = {**part, kind: waiting[kind].pop(0)}
                messages[at] = {**message, "content": parts}
    for kind, left in waiting.items():
        if left:
            raise RequestError(f"the messages have places for fewer {kind}s than were given")
    return messages


def _in_last_question(messages: list[Message], media: Media) -> list[Message]:
    for at in reversed(range(len(messages))):
        if messages[at].get("role") == "user":
            content = messages[at].get("content")
            parts = _parts(messages[at]) or [{"type": "text", "text": content or ""}]
            messages[at] = {**messages[at], "content": [*media.content("")[:-1], *parts]}
            return messages
    raise RequestError("images and videos go with a question: add a message of the user")


def apart(messages: Iterable[Message]) -> tuple[list[Message], Media]:
    """The messages with bare parts, as a chat template sees them, and their media in order."""
    found: dict[Any, list[Any]] = {"image": [], "video": []}
    bare: list[Message] = []
    for message in messages:
        parts = _parts(message)
        for i, part in enumerate(parts):
            kind: Any = part.get("type")
            if kind in found and kind in part:
                found[kind].append(part[kind])
                parts[i] = {"type": kind}
        bare.append({**message, "content": parts} if parts else message)
    return bare, Media.of(found["image"] or None, found["video"] or None)


def length(core: EngineCore, prompt: Prompt, media: Media) -> int:
    """Tokens that the model reads of a prompt, those of its pictures included."""
    codec = core.codec
    if isinstance(prompt, Chat):
        raise RequestError("the tokenizer is the server's: it can't be told how many tokens a prompt has")
    if media:
        text = prompt if isinstance(prompt, str) else codec.decode(prompt)
        return len(codec.read_media(text, media.pictures, media.clips).tokens)
    return len(codec.encode(prompt) if isinstance(prompt, str) else prompt)


def as_text(content: Any) -> str:
    """A message's content to read: each picture as its size."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(map(_described, content))


def _described(part: Mapping[str, Any]) -> str:
    match part:
        case {"type": "image", "image": picture} if hasattr(picture, "width"):
            return f"[image, {picture.width} x {picture.height}]"
        case {"type": "video", "video": clip} if hasattr(clip, "frames"):
            return f"[video, {len(clip.frames)} frames]"
        case {"text": text}:
            return str(text)
    return f"[{part.get('type', 'part')}]"


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return []
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        raise RequestError(
            'a message\'s content is a text, or parts such as {"type": "image"} and {"type": "text", "text": …}'
        )
    return [_of_a_server(part) for part in content]


def _of_a_server(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part, in our words if it is in those of OpenAI's interface."""
    name = str(part.get("type"))
    kind = name.removesuffix("_url")
    if kind == name or kind not in ("image", "video"):
        return part
    source = part.get(name)
    return {"type": kind, kind: source.get("url") if isinstance(source, Mapping) else source}


def _is_bare(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    return kind in ("image", "video") and kind not in part
