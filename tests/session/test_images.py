"""Images in questions and conversations: what the model is shown, what is kept, and files."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import mlx_nb
from mlx_nb import Conversation, MlxNbError, RequestError
from mlx_nb.backends.fake import EOS, text_tokens
from mlx_nb.prompts.media import load_image
from mlx_nb.request import Request

RED, BLUE = (PIL.Image.new("RGB", (8, 4), colour) for colour in ("red", "blue"))
URL = f"data:image/png;base64,{base64.b64encode(load_image(RED).thumbnail_png(8)).decode()}"
LOOK = {"type": "text", "text": "Look"}


def colours(request: Request) -> Iterator[int]:
    """What of pictures and clips it was shown, and the prompt."""
    arrays = {} if request.media is None else request.media.arrays
    names = {(255, 0, 0): "red", (0, 0, 255): "blue"}
    seen = [names[picture.image.getpixel((0, 0))] for picture in arrays.get("pictures", ())]
    seen += [f"{len(clip.frames)} frames" for clip in arrays.get("clips", ())]
    yield from text_tokens(f"{', '.join(seen) or 'nothing'} | {bytes(request.prompt_token_ids).decode()}")
    yield EOS


@pytest.fixture
def sees(adopt: Any) -> Any:
    """An engine whose model takes images."""
    return adopt(colours, takes_images=True)


@pytest.mark.usefixtures("sees")
def test_one_image_or_several_stand_before_the_text() -> None:
    assert mlx_nb.generate("What?", images=RED).text == "red | user: <image>What?\nassistant: "
    assert mlx_nb.generate("What?", images=[RED, BLUE], system="Look").text == (
        "red, blue | system: Look\nuser: <image><image>What?\nassistant: "
    )
    assert mlx_nb.generate("What?").text == "nothing | user: What?\nassistant: "


@pytest.mark.usefixtures("sees")
def test_a_list_of_frames_in_the_list_is_one_video() -> None:
    answer = mlx_nb.generate("What?", images=BLUE, videos=[[RED, RED, RED]])

    assert answer.text == "blue, 3 frames | user: <image><video>What?\nassistant: "


@pytest.mark.usefixtures("sees")
async def test_awaited_it_is_the_same() -> None:
    talk = Conversation()

    assert (await mlx_nb.agenerate("What?", images=RED)).text.startswith("red | ")
    assert (await mlx_nb.achat("What?", talk, images=RED)).text.startswith("red | ")
    assert (await mlx_nb.achat("And?", talk)).text.startswith("red | ")


@pytest.mark.usefixtures("sees")
@pytest.mark.parametrize(
    ("parts", "images"),
    [
        ([{"type": "image", "image": RED}, LOOK], None),
        ([{"type": "image"}, LOOK], [RED]),
        ([{"type": "image_url", "image_url": {"url": URL}}, LOOK], None),
        ([{"type": "image_url", "image_url": URL}, LOOK], None),
        ("Look", [RED]),
    ],
)
def test_messages_bring_their_images_or_leave_places_for_them(parts: Any, images: Any) -> None:
    answer = mlx_nb.generate([{"role": "user", "content": parts}], images=images)

    assert answer.text == "red | user: <image>Look\nassistant: "


@pytest.mark.usefixtures("sees")
@pytest.mark.parametrize(
    ("parts", "images", "refusal"),
    [
        ([{"type": "image"}, {"type": "image"}, LOOK], [RED], "more places for images than were given"),
        ([{"type": "image"}, LOOK], [RED, BLUE], "places for fewer images than were given"),
        ([{"type": "image", "image": 7}, LOOK], None, "no image can be made of int"),
        ([3], None, "content is a text, or parts"),
    ],
)
def test_messages_whose_images_do_not_add_up_are_refused(parts: Any, images: Any, refusal: str) -> None:
    with pytest.raises(RequestError, match=refusal):
        mlx_nb.generate([{"role": "user", "content": parts}], images=images)


@pytest.mark.usefixtures("sees")
def test_raw_text_takes_no_images() -> None:
    with pytest.raises(RequestError, match="leave them out, or raw"):
        mlx_nb.generate("What?", raw=True, images=RED)


@pytest.mark.usefixtures("sees")
def test_an_image_belongs_to_its_turn_and_is_sent_again_with_later_ones() -> None:
    talk = Conversation()

    mlx_nb.chat("One", talk, images=RED)
    mlx_nb.chat("Two", talk)
    answer = mlx_nb.chat("Three", talk, images=BLUE)

    assert answer.text.startswith("red, blue | user: <image>One\n")
    assert answer.text.endswith("user: <image>Three\nassistant: ")
    assert [len(turn.media.pictures) for turn in talk.turns] == [1, 0, 1]
    assert mlx_nb.generate(talk.messages[:1]).text == "red | user: <image>One\nassistant: "
    assert "user: [image, 8 x 4]\nOne" in str(talk)


def test_turns_that_are_left_out_take_their_images_with_them(adopt: Any) -> None:
    adopt(colours, takes_images=True, context_length=300)
    talk = Conversation()
    talk.add("One" * 40, "seen", mlx_nb.session.media.Media.of(RED))

    answer = mlx_nb.chat("Two" * 20, talk, images=BLUE, max_tokens=120)

    assert answer.turns_left_out == 1
    assert answer.text.startswith("blue | user: <image>Two")


def test_a_conversation_with_images_is_refused_by_a_model_of_text(adopt: Any) -> None:
    adopt(colours)
    talk = Conversation()
    talk.add("One", "seen", mlx_nb.session.media.Media.of(RED))

    with pytest.raises(RequestError, match="fake takes text only"):
        mlx_nb.chat("Two", talk)
    assert len(talk.turns) == 1


def test_a_saved_conversation_keeps_its_pictures_to_the_pixel(tmp_path: Path) -> None:
    talk = Conversation("Look")
    talk.add("One", "seen", mlx_nb.session.media.Media.of([RED, BLUE], [[RED, BLUE]]))
    talk.add("Two", "said")
    talk.save(tmp_path / "talk.json")

    again = Conversation.load(tmp_path / "talk.json")

    assert again.turns == talk.turns
    assert [p.digest for p in again.turns[0].media.pictures] == [load_image(p).digest for p in (RED, BLUE)]
    assert again.turns[0].media.clips[0].digest == talk.turns[0].media.clips[0].digest


@pytest.mark.parametrize(
    "image", ["/etc/hostname", "http://example.org/a.png", 7, "data:image/png;base64,AAAA"]
)
def test_a_file_names_no_other_files_and_no_addresses(tmp_path: Path, image: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image", "image": image}, LOOK]},
        {"role": "assistant", "content": "seen"},
    ]
    saved = {"format": "mlx_nb conversation", "version": 1, "messages": messages}
    (tmp_path / "talk.json").write_text(json.dumps(saved))

    with pytest.raises(MlxNbError) as refused:
        Conversation.load(tmp_path / "talk.json")
    assert "\n" not in str(refused.value)
    assert "talk.json is damaged" in str(refused.value)


@pytest.mark.usefixtures("sees")
def test_counting_takes_images_too() -> None:
    assert mlx_nb.count_tokens("What?", images=RED) == len("user: <image>What?\nassistant: ")
