"""Pictures and clips from whatever people have: files, URLs, bytes, arrays, figures.

What comes out is plain and safe: upright RGB of a bounded size, with a digest of its content. Files are not trusted:
everything that can be wrong with one is one line. Pillow is imported with the first picture, OpenCV with the first
video file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..validation import flag, integer, number
from .fetch import fetch

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["DEFAULT_LIMITS", "Clip", "MediaLimits", "Picture", "load_image", "load_images", "load_video"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is decoded: of the formats that Pillow knows, those that people have pictures in."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What is taken in.

    Parameters
    ----------
    max_bytes : int
        Of a file or a download.
    max_pixels : int
        That a picture may claim to have, before it is decoded.
    max_side : int
        Pixels; a picture with a longer side is scaled down to it.
    timeout_s : float
        Seconds for a download.
    max_frames : int
        Of a video; of a longer one, frames are taken evenly.
    allow_private : bool
        Download from addresses that are not public.
    """

    max_bytes: int = 50_000_000
    max_pixels: int = 89_000_000
    max_side: int = 4096
    timeout_s: float = 20.0
    max_frames: int = 64
    allow_private: bool = False

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_pixels", "max_side", "max_frames"):
            integer(name, getattr(self, name), low=1)
        number("timeout_s", self.timeout_s, low=0)
        flag("allow_private", self.allow_private)


DEFAULT_LIMITS = MediaLimits()


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a model gets it.

    Attributes
    ----------
    image : PIL.Image.Image
        RGB, upright, no side above `MediaLimits.max_side`.
    digest : str
        Hex, of size and pixels: the same picture by any door has the same.
    """

    image: Image = field(repr=False)
    digest: str

    @property
    def width(self) -> int:
        """In pixels."""
        return self.image.width

    @property
    def height(self) -> int:
        """In pixels."""
        return self.image.height

    def thumbnail_png(self, max_side: int = 128) -> bytes:
        """A small PNG of it, no side above `max_side` pixels."""
        small = self.image.copy()
        small.thumbnail((max_side, max_side))
        stream = io.BytesIO()
        small.save(stream, format="PNG")
        return stream.getvalue()


@dataclass(frozen=True, slots=True)
class Clip:
    """A video as a model gets it: its frames in order, `fps` of them a second of the video."""

    frames: tuple[Picture, ...] = field(repr=False)
    fps: float

    @property
    def digest(self) -> str:
        """Hex, of the frames and their rate."""
        return _clip_digest(self)


def load_image(source: Any, *, limits: MediaLimits = DEFAULT_LIMITS) -> Picture:
    """A picture from a path, an http(s) or ``data:`` URL, bytes, or an object that holds one.

    Objects are those of Pillow, arrays of height x width (x 1, 3 or 4) in uint8 or in floats from 0 to 1, figures of
    Matplotlib and IPython's Image. Of an animation it is the first frame, or where a Pillow image stands; what is
    transparent becomes white.

    Raises
    ------
    RequestError
        One line that says what is wrong with it.
    """
    if isinstance(source, Picture):
        return source
    image = _opened(source, limits)
    return _picture(image, limits, ours=image is not source)


def load_images(sources: Any, *, limits: MediaLimits = DEFAULT_LIMITS) -> list[Picture]:
    """Pictures from one source or a list of them; None is none."""
    if sources is None:
        return []
    several = sources if isinstance(sources, (list, tuple)) else [sources]
    return [load_image(source, limits=limits) for source in several]


def _opened(source: Any, limits: MediaLimits) -> Image:
    """A Pillow image, not decoded yet where it comes from bytes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _decoded(bytes(source), "the data")
    if isinstance(source, (str, os.PathLike)):
        return _from_name(source, limits)
    if _is_pillow(source):
        image: Image = source
        return image
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return _from_array(source)
    return _opened(_inside(source), limits)


def _inside(source: Any) -> bytes | str:
    """What a figure or an IPython Image holds."""
    if callable(getattr(source, "savefig", None)):
        stream = io.BytesIO()
        source.savefig(stream, format="png")
        return stream.getvalue()
    if hasattr(source, "embed"):
        for held in (getattr(source, "data", None), getattr(source, "url", None)):
            if isinstance(held, (bytes, str)) and held:
                return held
    raise RequestError(
        f"no image can be made of {type(source).__name__}: give a path, a URL, bytes, an array or a PIL image"
    )


def _is_pillow(source: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # there is no such object without it
    return module is not None and isinstance(source, module.Image)


def _from_name(source: str | os.PathLike[str], limits: MediaLimits) -> Image:
    name = os.fspath(source)
    if not isinstance(name, str):
        raise RequestError(f"a path is a text, got {type(name).__name__}")
    scheme = _scheme(name)
    if scheme:
        body = fetch(
            name, max_bytes=limits.max_bytes, timeout_s=limits.timeout_s, allow_private=limits.allow_private
        )
        return _decoded(body, "the data: URL" if scheme == "data" else name.partition("?")[0])
    path = _file(name, limits)
    return _decoded(path.read_bytes(), str(path))


def _scheme(name: str) -> str:
    """Of a URL that can be fetched; else nothing."""
    scheme, colon, _ = name.partition(":")
    return scheme.lower() if colon and scheme.lower() in ("http", "https", "data") else ""


def _file(name: str, limits: MediaLimits) -> Path:
    """A readable file of a bounded size."""
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # ~somebody who is not here
        path = path.expanduser()
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise RequestError(f"{path} is a folder: give a file in it")
        if not path.is_file():
            raise RequestError(f"{path} is no ordinary file")
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise RequestError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{name!r:.120} can't be read: {error}") from error
    if size > limits.max_bytes:
        raise RequestError(f"{path} has {size / 1e6:,.0f} MB, and {limits.max_bytes / 1e6:,.0f} are allowed")
    return path


def _decoded(data: bytes, name: str) -> Image:
    import PIL.Image

    if not data:
        raise RequestError(f"{name} is empty")
    try:
        with warnings.catch_warnings():  # of many pixels, for which there is a limit of our own
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
            return PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except PIL.UnidentifiedImageError:
        kind = ": it is SVG, which must be drawn as PNG first" if b"<svg" in data[:1024].lower() else ""
        raise RequestError(f"{name} is no picture in PNG, JPEG, WebP, GIF, BMP or TIFF{kind}") from None
    except Exception as error:  # a parser on bytes that nobody vouches for
        raise RequestError(f"{name} can't be read as a picture: {_line(error)}") from error


def _picture(image: Image, limits: MediaLimits, *, ours: bool) -> Picture:
    """`ours` may be changed; anything else is the caller's."""
    from PIL import ImageOps

    width, height = image.size
    if width * height > limits.max_pixels:
        raise RequestError(
            f"the picture claims {width:,} x {height:,} pixels, and {limits.max_pixels / 1e6:,.0f} million are "
            "allowed: scale it down"
        )
    try:
        if ours and max(image.size) > limits.max_side:
            image.draft("RGB", (limits.max_side, limits.max_side))  # JPEG decodes at a fraction of its size
        image.load()
        image = _rgb(ImageOps.exif_transpose(image))
        image.thumbnail((limits.max_side, limits.max_side))
    except Exception as error:  # truncated, damaged, or more than there is memory for
        raise RequestError(f"the picture can't be decoded: {_line(error)}") from error
    if 0 in image.size:
        raise RequestError(f"the picture has no pixels ({image.width} x {image.height})")
    digest = hashlib.sha256(f"{image.width}x{image.height}:".encode())
    digest.update(image.tobytes())
    return Picture(image, digest.hexdigest())


def _rgb(image: Image) -> Image:
    """In RGB, with white where it is transparent; a copy in any case."""
    import PIL.Image

    if image.mode.startswith("I;"):
        image = image.convert("I")
    if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits of grey
        high = image.getextrema()[1]
        scale = 255 / 65535 if image.mode != "F" and isinstance(high, (int, float)) and high > 255 else 1.0
        image = image.convert("F").point(lambda value: value * scale).convert("L")
    if image.mode == "P" or image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        ground = PIL.Image.new("RGBA", layer.size, "white")
        return PIL.Image.alpha_composite(ground, layer).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _from_array(source: Any) -> Image:
    import numpy as np
    import PIL.Image

    try:
        array = np.asarray(source)
    except Exception as error:
        raise RequestError(f"no array can be made of {type(source).__name__}: {_line(error)}") from error
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise RequestError(
            f"an image array has the shape (height, width), or (height, width, 1, 3 or 4), got {array.shape}"
        )
    if 0 in array.shape:
        raise RequestError(f"the picture has no pixels: its array has the shape {array.shape}")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    elif np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all() or array.min() < 0 or array.max() > 1:
            raise RequestError(
                "an image array of floats holds values from 0 to 1: scale it, or make it uint8"
            )
        array = (array * 255).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise RequestError(f"an image array is uint8, or floats from 0 to 1, got {array.dtype}")
    return PIL.Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array))


# -- video ------------------------------------------------------------------------------------------------


def load_video(source: Any, *, fps: float | None = None, limits: MediaLimits = DEFAULT_LIMITS) -> Clip:
    """A clip from a video file, a list of pictures, or an array of frames x height x width x channels.

    Parameters
    ----------
    fps : float, optional
        Frames to take of each second; all by default. Of frames that are given: how many make a second, 1 by default.

    Raises
    ------
    RequestError
        One line that says what is wrong with it.
    """
    if isinstance(source, Clip):
        return source
    if fps is not None and not number("fps", fps) > 0:
        raise RequestError(f"fps must be above 0, got {fps}")
    if isinstance(source, (str, os.PathLike)):
        name = str(source)
        if _scheme(name):
            raise RequestError(
                f"videos are not downloaded: save {name.partition('?')[0]!r:.80} to a file first"
            )
        return _from_video_file(_file(name, limits), fps, limits)
    frames = list(source) if isinstance(source, Sequence) or hasattr(source, "shape") else None
    if frames is None or isinstance(source, (bytes, bytearray)):
        raise RequestError(
            f"no video can be made of {type(source).__name__}: give a file, a list of frames or an array of them"
        )
    if not frames:
        raise RequestError("the video has no frames")
    rate = 1.0 if fps is None else float(fps)
    places = _evenly(len(frames), limits.max_frames)
    pictures = tuple(load_image(frames[i], limits=limits) for i in places)
    return Clip(pictures, rate * len(places) / len(frames))


def _from_video_file(path: Path, fps: float | None, limits: MediaLimits) -> Clip:
    try:
        import cv2
    except ImportError:
        raise RequestError(
            "a video file needs OpenCV: pip install opencv-python, or give the frames as a list"
        ) from None
    video = cv2.VideoCapture(str(path))
    try:
        count, rate = int(video.get(cv2.CAP_PROP_FRAME_COUNT)), float(video.get(cv2.CAP_PROP_FPS))
        if not video.isOpened() or count <= 0 or not rate > 0:
            raise RequestError(f"{path} is no video that OpenCV can read")
        wanted = count if fps is None else max(1, round(count * fps / rate))
        places = _evenly(count, min(wanted, limits.max_frames))
        pictures = []
        for place, frame in _frames(video, places):
            if frame is None:
                raise RequestError(f"{path} breaks off at frame {place:,} of {count:,}")
            pictures.append(load_image(frame, limits=limits))
    finally:
        video.release()
    return Clip(tuple(pictures), rate * len(places) / count)


def _frames(video: Any, places: Sequence[int]) -> Any:
    """The frames at these places, RGB; the others are read past, since seeking is not exact."""
    at = 0
    for place in places:
        while at < place and video.grab():
            at += 1
        there, frame = video.read()
        at += 1
        yield place, frame[..., ::-1] if there else None


def _evenly(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [i * count // most for i in range(most)]


def _clip_digest(clip: Clip) -> str:
    digest = hashlib.sha256(f"{clip.fps}:".encode())
    for frame in clip.frames:
        digest.update(frame.digest.encode())
    return digest.hexdigest()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
