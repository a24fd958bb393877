"""Pictures and clips from files and objects, sound and unsound."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from mlx_nb import RequestError
from mlx_nb.prompts.media import MediaLimits, Picture, load_image, load_images, load_video

SIZE = (40, 30)


def picture(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 0) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).convert(mode)


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header claims more pixels than it has."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


class Figure:
    """What Matplotlib's have."""

    def savefig(self, stream: Any, format: str) -> None:  # noqa: A002
        picture().save(stream, format=format)


class NotebookImage:
    """What IPython's have."""

    def __init__(self, data: bytes | None = None, url: str | None = None) -> None:
        self.data, self.url, self.embed = data, url, data is not None


def test_the_same_picture_by_any_door_has_one_digest(tmp_path: Path) -> None:
    image, data = picture(), encoded(picture())
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    url = "data:image/png;base64," + __import__("base64").b64encode(data).decode()
    array = np.asarray(image)
    sources = [
        image, data, bytearray(data), path, str(path), url, array, array.astype(np.float32) / 255, Figure(),
        NotebookImage(data), NotebookImage(url=url), load_image(image),
    ]  # fmt: skip
    assert len({load_image(source).digest for source in sources}) == 1
    assert load_image(picture(seed=1)).digest != load_image(image).digest


def test_size_is_part_of_the_digest() -> None:
    grey = [PIL.Image.new("RGB", size, "grey") for size in ((4, 6), (6, 4))]
    assert load_image(grey[0]).digest != load_image(grey[1]).digest


def test_what_comes_out_is_upright_rgb() -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = load_image(encoded(picture(), "JPEG", exif=exif))
    assert (turned.width, turned.height) == SIZE[::-1]
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"):
        image = (
            picture("L").convert(mode)
            if mode != "I;16"
            else PIL.Image.fromarray(np.asarray(picture("L")).astype(np.uint16) * 257)
        )
        assert load_image(image).image.mode == "RGB"


def test_sixteen_bits_keep_their_brightness() -> None:
    grey = np.array([[0, 65535, 32768]], dtype=np.uint16)
    assert np.asarray(load_image(PIL.Image.fromarray(grey)).image)[0, :, 0].tolist() == pytest.approx(
        [0, 255, 127], abs=1
    )


def test_sixteen_bits_in_either_order_of_bytes() -> None:
    big = PIL.Image.frombytes("I;16B", (2, 1), b"\xff\xff\x80\x00")
    assert load_image(big).image.tobytes() == b"\xff\xff\xff\x7f\x7f\x7f"


def test_transparent_is_white() -> None:
    clear = PIL.Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    palette = PIL.Image.new("P", (2, 2), 3)
    palette.info["transparency"] = 3
    for image in (clear, encoded(clear), palette):
        assert np.asarray(load_image(image).image).min() == 255


def test_of_an_animation_it_is_the_first_frame() -> None:
    frames = [PIL.Image.new("RGB", (5, 5), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert load_image(data).image.getpixel((0, 0)) == (255, 0, 0)


def test_a_large_picture_is_scaled_down_and_a_tiny_one_stays() -> None:
    wide = load_image(PIL.Image.new("RGB", (20_000, 500)))
    assert (wide.width, wide.height) == (4096, 102)
    assert load_image(PIL.Image.new("RGB", (1, 1))).image.size == (1, 1)
    small = load_image(picture(), limits=MediaLimits(max_side=10))
    assert max(small.width, small.height) == 10


def test_the_caller_s_image_is_left_alone() -> None:
    image = picture(size=(300, 200))
    load_image(image, limits=MediaLimits(max_side=10))
    assert image.size == (300, 200)


def test_the_caller_s_file_stays_where_it_is() -> None:
    frames = [PIL.Image.new("RGB", (5, 5), colour) for colour in ("red", "blue")]
    animation = PIL.Image.open(
        io.BytesIO(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    )
    animation.seek(1)
    assert load_image(animation).image.getpixel((0, 0)) == (0, 0, 255)
    assert animation.tell() == 1
    photo = PIL.Image.open(io.BytesIO(encoded(picture(size=(64, 64)), "JPEG")))
    assert load_image(photo, limits=MediaLimits(max_side=16)).image.size == (16, 16)
    assert photo.size == (64, 64)


def test_a_thumbnail_is_a_small_png() -> None:
    small = PIL.Image.open(io.BytesIO(load_image(picture(size=(300, 200))).thumbnail_png(64)))
    assert (small.format, small.size) == ("PNG", (64, 43))


def test_images_one_or_several_or_none() -> None:
    assert load_images(None) == []
    assert len(load_images(picture())) == 1
    assert all(isinstance(each, Picture) for each in load_images([picture(), encoded(picture())]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"<html><body>not found</body></html>", "no picture in PNG"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "it is SVG"),
        (encoded(picture())[:200], "can't be decoded|can't be read"),
        (encoded(picture(), "JPEG")[:300], "can't be decoded|can't be read"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 50, "no picture|can't be read|can't be decoded"),
        (bomb(100_000, 100_000), "allowed|exceeds limit"),
        (bomb(10_000, 9_500), "million are allowed"),
        (bomb(3000, 3000), "can't be decoded"),
        (b"%PDF-1.4 something", "no picture"),
    ],
)
def test_bytes_that_are_no_sound_picture(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(RequestError, match=message) as caught:
            load_image(source)
        assert "\n" not in str(caught.value)


def test_paths_that_are_no_picture(tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("hello")
    large = tmp_path / "large.png"
    large.write_bytes(encoded(picture()))
    for source, message in [
        (tmp_path, "is a folder"),
        (tmp_path / "nowhere.png", "there is no file"),
        ("~/surely/not/here.png", "there is no file"),
        ("~nobody-here/picture.png", "there is no file"),
        ("data", "there is no file data"),
        (text, "no picture"),
        ("\0", "can't be read"),
        ("/dev/zero", "no ordinary file"),
    ]:
        with pytest.raises(RequestError, match=message):
            load_image(source)
    with pytest.raises(RequestError, match="0 are allowed"):
        load_image(large, limits=MediaLimits(max_bytes=100))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 2), np.uint8), "shape"),
        (np.zeros((4,), np.uint8), "shape"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.full((4, 4, 3), 2.0), "from 0 to 1"),
        (np.full((4, 4, 3), np.nan), "from 0 to 1"),
        (np.zeros((4, 4, 3), np.int32), "uint8"),
        (7, "no image can be made of int"),
        (object(), "no image can be made of object"),
        ({"a": 1}, "no image can be made of dict"),
        ("data:image/png;base64,@@@", "not sound base64"),
        ("data:image/png", "after a comma"),
    ],
)
def test_what_no_image_can_be_made_of(source: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_image(source)


def test_grey_and_alpha_arrays() -> None:
    assert load_image(np.zeros((4, 4), np.uint8)).image.mode == "RGB"
    assert load_image(np.ones((4, 4), bool)).image.getpixel((0, 0)) == (255, 255, 255)
    assert load_image(np.zeros((4, 4, 4), np.uint8)).image.getpixel((0, 0)) == (255, 255, 255)


def test_an_mlx_array_is_an_array() -> None:
    import mlx.core as mx

    assert load_image(mx.zeros((4, 5, 3), dtype=mx.uint8)).image.size == (5, 4)


def test_clips_from_frames_and_arrays() -> None:
    frames = [picture(seed=i) for i in range(10)]
    clip = load_video(frames, fps=5)
    assert (len(clip.frames), clip.fps) == (10, 5)
    array = np.stack([np.asarray(frame) for frame in frames])
    assert load_video(array, fps=5).digest == clip.digest
    assert load_video(frames[::-1], fps=5).digest != clip.digest
    short = load_video(frames, fps=5, limits=MediaLimits(max_frames=4))
    assert [frame.digest for frame in short.frames] == [clip.frames[i].digest for i in (0, 2, 5, 7)]
    assert short.fps == 2


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "no frames"),
        (b"abc", {}, "no video can be made of bytes"),
        (7, {}, "no video can be made of int"),
        ("/nowhere.mp4", {}, "there is no file"),
        ([b"abc"], {}, "no picture"),
        ([picture()], {"fps": 0}, "fps must be above 0"),
        ("https://example.org/a.mp4?key=1", {}, "not downloaded: save 'https://example.org/a.mp4' to a file"),
    ],
)
def test_what_is_no_video(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_video(source, **options)


def test_a_video_file_is_read_or_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    try:
        import cv2
    except ImportError:
        path.write_bytes(b"RIFF")
        with pytest.raises(RequestError, match="pip install opencv-python"):
            load_video(path)
        return
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10.0, SIZE)
    for i in range(20):
        writer.write(np.full((SIZE[1], SIZE[0], 3), i * 12, np.uint8))
    writer.release()
    clip = load_video(path, fps=5)
    assert (len(clip.frames), clip.fps) == (10, 5)
    brightness = [frame.image.getpixel((3, 3))[0] for frame in clip.frames]
    assert brightness == sorted(brightness)
    path.write_bytes(b"not a video")
    with pytest.raises(RequestError, match="no video that OpenCV can read"):
        load_video(path)


def test_importing_the_module_imports_no_pillow() -> None:
    import subprocess
    import sys

    code = "import sys; import mlx_nb.prompts.media; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"PIL", "numpy", "cv2", "mlx"} & {name.partition(".")[0] for name in done.stdout.split()}
