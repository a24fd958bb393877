"""Images in the chat panel: from a picked file's bytes to the model, and back as small pictures."""

import base64
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

import PIL.Image
import pytest

from mlx_nb import AsyncEngineCore, Conversation, EngineConfig, EngineCore
from mlx_nb.backends.fake import EOS, fake_backend, text_tokens
from mlx_nb.request import Request
from mlx_nb.session.media import Media
from mlx_nb.widgets import ChatPanel

RED, BLUE = (PIL.Image.new("RGB", (800, 400), colour) for colour in ("red", "blue"))


def png(image: PIL.Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())


def colours(request: Request) -> Iterator[int]:
    pictures = [] if request.media is None else request.media.arrays["pictures"]
    names = {(255, 0, 0): "red", (0, 0, 255): "blue"}
    yield from text_tokens(
        " ".join(names[picture.image.getpixel((0, 0))] for picture in pictures) or "nothing"
    )
    yield EOS


@pytest.fixture
def panel() -> Iterator[ChatPanel]:
    """A panel, being looked at, with a model that takes images."""
    backend = fake_backend(colours, takes_images=True)
    core = EngineCore(None, None, EngineConfig(model_name="demo"), backend=backend)
    engine = AsyncEngineCore.over(core)
    core.launch()
    core.wait_ready(10)
    panel = ChatPanel(engine)
    panel._handle_custom_msg({"kind": "view", "view": "v1", "order": 1, "open": True}, [])
    yield panel
    panel.close()
    core.close()


def turns(panel: ChatPanel) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = panel.get_state()["talk"]["turns"]
    return shown


def send(panel: ChatPanel, text: str, *images: tuple[str, bytes], replaces: str | None = None) -> None:
    message = {
        "kind": "chat_send",
        "text": text,
        "replaces": replaces,
        "images": [name for name, _ in images],
    }
    panel._handle_custom_msg(message, [memoryview(data) for _, data in images])


def answers(panel: ChatPanel) -> list[str]:
    return [turn["answer"] for turn in turns(panel) if turn["status"]["ending"] == "done"]


def test_picked_images_are_shown_to_the_model_and_small_to_the_reader(panel: ChatPanel) -> None:
    assert eventually(lambda: panel.head.get("takes_images"))
    send(panel, "Which?", ("a.png", png(RED)), ("b.png", png(BLUE)))

    assert eventually(lambda: answers(panel) == ["red blue"])
    images = turns(panel)[0]["images"]
    assert [image["name"] for image in images] == ["a.png", "b.png"]
    small = PIL.Image.open(
        io.BytesIO(base64.b64decode(images[0]["src"].removeprefix("data:image/png;base64,")))
    )
    assert small.size == (320, 160)
    assert [len(turn.media.pictures) for turn in panel.conversation.turns] == [2]


def test_images_stay_with_their_turn(panel: ChatPanel) -> None:
    send(panel, "", ("a.png", png(RED)))
    assert eventually(lambda: answers(panel) == ["red"])
    send(panel, "And?", ("b.png", png(BLUE)))
    assert eventually(lambda: answers(panel) == ["red", "red blue"])

    send(panel, "Edited", replaces=turns(panel)[1]["key"])
    assert eventually(lambda: [turn["question"] for turn in turns(panel)] == ["", "Edited"])
    assert eventually(lambda: answers(panel) == ["red", "red blue"])
    panel._handle_custom_msg({"kind": "chat", "action": "regenerate"}, [])
    assert eventually(lambda: answers(panel) == ["red", "red blue"] and len(panel.conversation.turns) == 2)
    assert [image["name"] for image in turns(panel)[1]["images"]] == ["b.png"]


def test_a_turn_that_was_asked_elsewhere_shows_its_images(panel: ChatPanel) -> None:
    panel.conversation.add("Look", "seen", Media.of(RED, [[BLUE, BLUE]]))

    assert eventually(lambda: turns(panel))
    assert [image["src"][:22] for image in turns(panel)[0]["images"]] == ["data:image/png;base64,"] * 2
    send(panel, "And?")
    assert eventually(lambda: answers(panel) == ["seen", "red"])


def test_what_is_no_image_is_said_and_no_turn(panel: ChatPanel) -> None:
    send(panel, "Look", ("a.png", b"rubbish"))

    assert eventually(lambda: panel.head["problem"] is not None)
    assert "is no picture in PNG" in panel.head["problem"]
    assert not turns(panel)
    assert panel.conversation.turns == ()


def test_a_snapshot_keeps_the_small_pictures_and_escapes_their_names(panel: ChatPanel) -> None:
    send(panel, "Look", ('"><script>.png', png(RED)))
    assert eventually(lambda: answers(panel) == ["red"])

    html = panel._repr_mimebundle_()[0]["text/html"]  # type: ignore[index]
    assert 'alt="&quot;&gt;&lt;script&gt;.png"' in html
    assert "<script>" not in html


def test_a_model_of_text_answers_no_conversation_with_images() -> None:
    core = EngineCore(None, None, EngineConfig(model_name="demo"), backend=fake_backend(colours))
    core.launch()
    core.wait_ready(10)
    talk = Conversation()
    talk.add("Look", "seen", Media.of(RED))
    panel = ChatPanel(core, talk)
    try:
        send(panel, "And?")
        assert eventually(lambda: turns(panel) and turns(panel)[-1]["status"]["ending"] == "failed")
        assert "takes text only" in turns(panel)[-1]["status"]["problem"]
        assert len(talk.turns) == 1
    finally:
        panel.close()
        core.close()
