"""A column of images: what each row shows the model, what is wrong with one, and what is the same."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import pytest

import mlx_nb
from mlx_nb import RequestError, TemplateError
from mlx_nb.backends.fake import text_tokens
from mlx_nb.request import Request

from .conftest import Adopt

RED, BLUE = (PIL.Image.new("RGB", (8, 4), colour) for colour in ("red", "blue"))
NAMES = {(255, 0, 0): "red", (0, 0, 255): "blue"}


def colours(request: Request) -> list[int]:
    """Name what the row shows, and its question."""
    pictures = [] if request.media is None else request.media.arrays["pictures"]
    seen = ", ".join(NAMES.get(picture.image.getpixel((0, 0)), "other") for picture in pictures)
    question = bytes(request.prompt_token_ids).decode().rpartition("user: ")[2].removesuffix("\nassistant: ")
    return text_tokens(f"{seen or 'nothing'}: {question}")


@pytest.fixture
def engine(adopt: Adopt) -> Any:
    """An engine that sees."""
    return adopt(colours, takes_images=True, prefixes=True)


def frame(*photos: Any, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"photo": pd.Series(list(photos), dtype=object), **columns})


def png(image: PIL.Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


@pytest.mark.usefixtures("engine")
def test_each_row_shows_its_image_whatever_it_is_made_of(tmp_path: Path) -> None:
    BLUE.save(tmp_path / "blue.png")
    array = np.zeros((4, 8, 3), np.uint8)
    array[..., 2] = 255
    photos = [RED, tmp_path / "blue.png", str(tmp_path / "blue.png"), png(RED), array]

    result = frame(*photos).mlx.generate("What?", images="photo")

    assert [text.partition(":")[0] for text in result["text"]] == ["red", "blue", "blue", "red", "blue"]
    assert result["text"][0] == "red: <image>What?"


@pytest.mark.usefixtures("engine")
def test_a_list_is_several_images_and_a_null_is_none() -> None:
    photos = [[RED, BLUE], [RED, None], (), None, float("nan"), pd.NA, ""]

    result = frame(*photos, n=range(7)).mlx.generate("Row {{ n }}", images="photo")

    assert list(result["text"]) == [
        "red, blue: <image><image>Row 0",
        "red: <image>Row 1",
        *(f"nothing: Row {n}" for n in range(2, 7)),
    ]


@pytest.mark.usefixtures("engine")
def test_what_can_not_be_read_fails_its_row_alone() -> None:
    result = frame(RED, "no/such.png", b"rubbish", 7, BLUE).mlx.generate("What?", images="photo")

    assert list(result["state"]) == ["done", "failed", "failed", "failed", "done"]
    assert result["error"][1] == "there is no file no/such.png"
    assert "no picture" in result["error"][2]
    assert "no image can be made of int" in result["error"][3]


def test_rows_that_show_and_ask_the_same_run_once(engine: Any) -> None:
    result = frame(RED, BLUE, RED.copy(), None).mlx.generate("What?", images="photo")

    assert [text[:4] for text in result["text"]] == ["red:", "blue", "red:", "noth"]
    assert engine.get_stats()["num_requests_processed"] == 3


def test_a_checkpoint_knows_images_by_their_content(engine: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"images": "photo", "checkpoint": tmp_path / "seen.db"}
    first = frame(RED, BLUE).mlx.generate("What?", **options)

    again = frame(png(RED), png(BLUE)).mlx.generate("What?", **options)

    assert list(again["text"]) == list(first["text"])
    assert engine.get_stats()["num_requests_processed"] == 2


@pytest.mark.usefixtures("engine")
def test_conversations_show_it_with_their_last_question() -> None:
    talk = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two"},
    ]
    table = frame(RED, talk=pd.Series([talk], dtype=object))

    result = table.mlx.generate(messages="talk", images=mlx_nb.col("photo"))

    assert list(result["text"]) == ["red: <image>Two"]


@pytest.mark.usefixtures("engine")
async def test_awaited_it_is_the_same() -> None:
    result = await frame(RED).mlx.agenerate("What?", images="photo")

    assert list(result["text"]) == ["red: <image>What?"]


def test_no_more_images_are_held_than_the_engine_is_given(
    adopt: Adopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    asked = 0
    most = 0
    load = mlx_nb.prompts.media.load_image

    def counted(source: Any, **options: Any) -> Any:
        if isinstance(source, PIL.Image.Image):
            loaded.append(source)
        return load(source, **options)

    def count(request: Request) -> list[int]:
        nonlocal asked, most
        asked += 1
        most = max(most, len(loaded) - asked)
        return colours(request)

    monkeypatch.setattr("mlx_nb.prompts.media.load_image", counted)
    adopt(count, takes_images=True, prefixes=True, batch=2)
    photos = [PIL.Image.new("RGB", (8, 4 + n), "red") for n in range(100)]

    assert set(frame(*photos).mlx.generate("What?", images="photo")["state"]) == {"done"}
    assert len(loaded) == asked == 100
    assert most <= 2 * 2, "two batches"


@pytest.mark.parametrize("prompt", [{"template": "What?"}, {"template": "Row {{ n }}"}])
def test_a_model_of_text_refuses_the_column_before_anything_runs(adopt: Adopt, prompt: Any) -> None:
    core = adopt()

    with pytest.raises(
        RequestError, match="takes text only: leave images out, or start a model that takes images"
    ):
        frame(None, RED, n=[1, 2]).mlx.generate(**prompt, images="photo")
    assert core.get_stats()["num_requests_processed"] == 0


@pytest.mark.usefixtures("engine")
def test_what_is_wrong_with_the_call_is_refused_at_once() -> None:
    with pytest.raises(TemplateError, match="there is no column 'foto'; did you mean 'photo'"):
        frame(RED).mlx.generate("What?", images="foto")
    with pytest.raises(RequestError, match="images need the chat template: leave raw out"):
        frame(RED).mlx.generate("What?", images="photo", raw=True)


@pytest.mark.usefixtures("engine")
def test_a_preview_counts_them_and_says_what_fails() -> None:
    look = frame(RED, "no/such.png").mlx.preview("What?", images="photo")

    assert list(look.frame["state"]) == ["ready", "failed"]
    assert look.frame["prompt_tokens"][0] == len("user: <image>What?\nassistant: ")
