"""``--logprobs`` in a live kernel: a token view for each answer, with a snapshot that needs no widget."""

import time
from pathlib import Path

import pytest
from kernel_session import Cell, KernelSession

pytestmark = pytest.mark.kernel

WORDS = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "widgets")!r})
from word_engine import adopt_words
adopt_words("words", step_s=0.002)
adopt_words("slow", repeat=20, step_s=0.02)
default_session().use("words")
"""
VIEW = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module", autouse=True)
def words(kernel: KernelSession) -> None:
    """Engines that say a story of 67 tokens, of which " slow" is a surprise."""
    cell = kernel.run(WORDS)
    assert cell.status == "ok", cell


def kinds(cell: Cell) -> list[str]:
    """What a cell shows, in order."""
    return [
        "view" if VIEW in data else data["text/plain"].split(" ·")[0].split("\n")[0] for data in cell.displays
    ]


@pytest.mark.parametrize(
    "cell", ["%%mlx_generate --logprobs 5 -o it\nTides?", "%mlx_generate --logprobs 5 Tides?;"]
)
def test_an_answer_is_a_snapshot_a_view_and_its_figures(kernel: KernelSession, cell: str) -> None:
    ran = kernel.run(cell)

    assert (ran.status, ran.value) == ("ok", None)
    assert kinds(ran) == ["Reasoning:", "view", "67 tokens"]
    snapshot = ran.displays[0]
    assert "Tides are the slow breathing" in snapshot["text/plain"]
    assert "likelier: ' which'" in snapshot["text/plain"]
    assert "<img" not in snapshot["text/html"]
    assert "&lt;img src=x" in snapshot["text/html"]


def test_each_of_several_answers_has_its_view(kernel: KernelSession) -> None:
    assert kinds(kernel.run("%mlx_generate --logprobs 5 --n 2 Tides?")) == [
        *("Reasoning:", "view", "1 of 2"),
        *("Reasoning:", "view", "2 of 2"),
    ]


def test_a_captured_answer_is_shown_later(kernel: KernelSession) -> None:
    assert kinds(kernel.run("%%capture kept\n%mlx_generate --logprobs 5 Tides?")) == []
    assert [VIEW in data for data in kernel.run("kept.show()").displays[:3]] == [False, True, False]


def test_an_answer_in_the_background_and_one_kept_can_be_looked_at(kernel: KernelSession) -> None:
    kernel.run("%mlx_generate --bg --logprobs 5 -o handle Tides?")

    assert kinds(kernel.run("handle.result(20).tokens_view()")) == ["Reasoning:", "view"]


def test_an_interrupted_answer_keeps_the_tokens_so_far(kernel: KernelSession) -> None:
    cell = kernel.send("%mlx_generate --logprobs 5 -e slow Tides?")
    time.sleep(1)
    kernel.interrupt()
    cell.wait()

    assert cell.error[0] == "KeyboardInterrupt"
    assert VIEW in cell.displays[1]
    assert cell.displays[2]["text/plain"].endswith("interrupted")
    assert 0 < kernel.ask("len(_.tokens)") < 1000
    assert kinds(kernel.run("_.tokens_view()"))[1] == "view"
