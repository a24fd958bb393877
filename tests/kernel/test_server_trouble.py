"""What a cell shows while its server is in trouble, and what is left of an answer that was cut."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("openai")

from stand_in import StandIn, fails, for_ever, hangs, says

if TYPE_CHECKING:
    from kernel_session import KernelSession

pytestmark = pytest.mark.kernel


@pytest.fixture
def server(kernel: "KernelSession") -> Iterator[StandIn]:
    """A stand-in whose engine is the current one."""
    server = StandIn()
    cell = kernel.run(f"%mlx_engine connect {server.url} --name server --patience 8 --timeout 5")
    assert cell.status == "ok", cell
    yield server
    kernel.run("%mlx_engine stop server")
    server.stop()


def test_a_cell_says_what_it_waits_for(kernel: "KernelSession", server: StandIn) -> None:
    from kernel_session import eventually

    server.answers = [fails(503, "loading the model", Retry_After="1.5"), says("Hello")]
    cell = kernel.send("%%mlx_generate\nSay hello")

    eventually(lambda: any("asking again: " in text and "loading the model" in text for text in cell.texts))
    cell.wait()
    assert cell.texts[0].strip() == "Hello"
    assert cell.status == "ok"


def test_a_slow_server_is_waited_for(kernel: "KernelSession", server: StandIn) -> None:
    from kernel_session import eventually

    def slow(handler: object, body: dict[str, object]) -> None:
        hangs(1)(handler, body)  # type: ignore[arg-type]
        says("Hello")(handler, body)  # type: ignore[arg-type]

    server.answers = [slow]
    cell = kernel.send("%%mlx_generate\nSay hello")

    eventually(lambda: any("waiting for the server" in text for text in cell.texts))
    assert cell.wait().texts[0].strip() == "Hello"


def test_an_answer_that_is_cut_stays_as_far_as_it_came(kernel: "KernelSession", server: StandIn) -> None:
    server.answers = [says("Hel", finish=None, every_s=0.3), says("Hello")]
    cell = kernel.run("%%mlx_generate -o answer\nSay hello")

    assert cell.texts[0].strip() == "Hel"
    assert "was lost in the middle of an answer" in cell.reply["evalue"]
    assert kernel.ask("(answer.text, answer.output.finish_reason)") == ("Hel", "error")


def test_an_interrupted_cell_closes_its_stream(kernel: "KernelSession", server: StandIn) -> None:
    from kernel_session import eventually

    server.answers = [for_ever]
    cell = kernel.send("%%mlx_generate -n 100000\nGo on")
    eventually(lambda: cell.texts and "again again" in cell.texts[0])
    kernel.interrupt()
    cell.wait()

    eventually(lambda: server.left == 1)


def test_a_cell_that_waits_for_a_dead_server_can_be_interrupted(
    kernel: "KernelSession", server: StandIn
) -> None:
    from kernel_session import eventually

    server.stop()
    cell = kernel.send("%%mlx_generate\nSay hello")
    eventually(lambda: any("can't be reached" in text for text in cell.texts))
    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 2
    server.start()
