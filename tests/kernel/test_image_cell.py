"""Images on the lines of magics, in a live kernel: small above the answer, and part of the notebook."""

from collections.abc import Iterator

import pytest
from kernel_session import KernelSession

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def sees(kernel: KernelSession) -> Iterator[KernelSession]:
    """The kernel, with a picture and an engine that takes it."""
    kernel.run("import PIL.Image\nphoto = PIL.Image.new('RGB', (640, 320), 'red')\nphotos = [photo] * 14")
    kernel.run("seeing = adopt('seeing', takes_images=True)")
    yield kernel
    kernel.run("default_session().use('default')")


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_a_small_picture_stands_above_the_answer(sees: KernelSession, before: str) -> None:
    cell = sees.run(f"{before}%%mlx_generate -i photo -n 6 -e seeing\nWhat is this?")

    picture, answer, _ = cell.displays
    assert picture["text/plain"] == "[photo, 640 x 320]"
    assert picture["text/html"].count("<img ") == 1
    assert 'src="data:image/png;base64,' in picture["text/html"]
    assert answer["text/markdown"] == "user: "


def test_names_are_escaped_and_no_more_than_a_dozen_are_shown(sees: KernelSession) -> None:
    sees.run("name = '<script>.png'\nphoto.save(name)")
    try:
        cell = sees.run("%%mlx_generate -i '<script>.png' -i photos -n 4 -e seeing\nWhat is this?")
    finally:
        sees.run("import os; os.remove(name)")

    shown = cell.displays[0]["text/html"]
    assert 'alt="&lt;script&gt;.png, 640 x 320"' in shown
    assert "<script>" not in shown
    assert shown.count("<img ") == 12
    assert "and 3 more" in shown


def test_a_quiet_cell_shows_nothing_and_a_chat_only_the_turns_own_images(sees: KernelSession) -> None:
    assert sees.run("%%mlx_generate -i photo -q -n 4 -e seeing\nWhat?").displays == []

    first = sees.run("%%mlx_chat pictures -i photo -n 4 -e seeing\nWhat?")
    second = sees.run("%%mlx_chat pictures -n 30 -e seeing\nAnd?")

    assert "text/html" in first.displays[0]
    assert second.texts[0].startswith("user: <image>What?")
    assert len(second.displays) == 2


def test_a_model_of_text_shows_nothing_but_the_refusal(sees: KernelSession) -> None:
    cell = sees.run("%%mlx_generate -i photo -e default\nWhat is this?")

    assert cell.displays == []
    assert "fake takes text only: leave images out" in cell.stderr + cell.error[1]
