"""Images and videos of a magic's line: what their words stand for, and how a cell shows them.

Small pictures go above the answer, so that a notebook tells what was asked about; their names are escaped, and they
are part of the notebook, not links. A terminal shows none.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..session.media import NO_MEDIA, Media
from .arguments import Option
from .formats import Bundle
from .names import Names

if TYPE_CHECKING:
    from ..prompts.media import Clip, Picture

__all__ = ["MEDIA", "NOTHING", "Attached", "attached"]

MEDIA = (
    Option("-i --image", "an image for the model: a variable, a file or a URL", "IMAGE", many=True),
    Option("--video", "a video for it: a variable (a list of frames), or a file", "VIDEO", many=True),
)
"""A word that is the name of a variable means the variable."""

SIDE = 128
"""Most pixels of a thumbnail's side."""

SHOWN = 12
"""Most thumbnails of a prompt."""


@dataclass(frozen=True, slots=True)
class Attached:
    """What goes with a prompt, and what people call it: a label for each picture, then for each clip."""

    media: Media = NO_MEDIA
    labels: tuple[str, ...] = ()

    def thumbnails(self) -> Bundle | None:
        """The pictures, small, as a notebook shows them; None if there are none."""
        items = list(self._items())
        if not items:
            return None
        shown = "".join(_as_img(picture, about) for picture, about in items[:SHOWN])
        more = f"<small>and {len(items) - SHOWN:,} more</small>" if len(items) > SHOWN else ""
        return {
            "text/plain": "\n".join(f"[{about}]" for _, about in items),
            "text/html": f'<div style="display:flex;flex-wrap:wrap;gap:8px;align-items:end">{shown}{more}</div>',
        }

    def _items(self) -> Iterator[tuple[Picture, str]]:
        pictures, clips = self.media.pictures, self.media.clips
        for picture, label in zip(pictures, self.labels, strict=False):
            yield picture, f"{label}, {picture.width} x {picture.height}"
        for clip, label in zip(clips, self.labels[len(pictures) :], strict=True):
            yield clip.frames[0], f"{label}, {_length(clip)}"


NOTHING = Attached()


def attached(given: Mapping[str, Any], names: Names) -> Attached:
    """The images and videos among the options, taken in.

    Raises
    ------
    UsageError, RequestError
        One line, for a word that stands for nothing and for what is no image.
    """
    if "image" not in given and "video" not in given:
        return NOTHING
    pictures: list[Any] = []
    labels: list[str] = []
    for word in given.get("image", ()):
        value = names.media(word, "--image", "an image")
        several = value if isinstance(value, list | tuple) else [value]
        pictures += several
        labels += _numbered(word, several)
    videos = [names.media(word, "--video", "a video") for word in given.get("video", ())]
    media = Media.of(pictures or None, videos or None)
    return Attached(media, (*labels, *map(_label, given.get("video", ()))))


def _numbered(word: str, items: Sequence[Any]) -> list[str]:
    label = _label(word)
    return [label] if len(items) == 1 else [f"{label}[{i}]" for i in range(len(items))]


def _label(word: str) -> str:
    return "image" if word.startswith("data:") else word if len(word) <= 80 else f"…{word[-79:]}"


def _length(clip: Clip) -> str:
    frames = len(clip.frames)
    return "1 frame" if frames == 1 else f"{frames:,} frames"


def _as_img(picture: Picture, about: str) -> str:
    data = base64.b64encode(picture.thumbnail_png(SIDE)).decode()
    about = html.escape(about, quote=True)
    return f'<img src="data:image/png;base64,{data}" alt="{about}" title="{about}">'
