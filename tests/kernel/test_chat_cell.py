"""Conversations, and the blocking functions of the package, in a live kernel."""

import pytest
from kernel_session import KernelSession, eventually

pytestmark = pytest.mark.kernel


def test_an_answer_streams_into_its_cell_and_the_next_question_knows_it(kernel: KernelSession) -> None:
    first = kernel.run("%%mlx_chat streams -n 30\nabc")
    second = kernel.run("%%mlx_chat streams -n 60\nxyz")

    answer, note = first.displays
    assert answer["text/markdown"].startswith("user: abc\nassistant: ")
    assert note["text/plain"].startswith("30 tokens · ")
    assert len(first.drawn_at) > 2
    assert second.texts[0].startswith(f"user: abc\nassistant: {first.texts[0]}\nus")
    assert kernel.ask("_.text") == second.texts[0]


@pytest.mark.parametrize("before", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_an_interrupted_turn_is_kept_with_what_there_is_until_undo(
    kernel: KernelSession, before: str
) -> None:
    kernel.run("from mlx_nb import conversation")
    call = "get_ipython().run_cell_magic('mlx_chat', 'cut -n 100000', 'abc')"
    cell = kernel.send(f"{before}{call}" if before else "%%mlx_chat cut -n 100000\nabc")
    after = kernel.send("went_on = True")
    eventually(lambda: cell.texts and len(cell.texts[0]) > 8)

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.error[0] == "KeyboardInterrupt"
    assert after.wait().status == "aborted"
    ((question, answer),) = kernel.ask("[(t.question, t.answer) for t in conversation('cut').turns]")
    assert (question, answer) == ("abc", cell.texts[0])
    assert kernel.run("%mlx_chat cut --undo").stdout == "taken back: abc\n"
    assert kernel.ask("conversation('cut').turns") == ()


def test_a_conversation_is_shown_as_markdown(kernel: KernelSession) -> None:
    kernel.run("%%mlx_chat shown -n 4 --system 'Be brief'\nabc")

    (shown,) = kernel.run("%mlx_chat shown --show").displays

    assert shown["text/markdown"] == "**system**\n\nBe brief\n\n**user**\n\nabc\n\n**assistant**\n\nsyst"
    assert shown["text/plain"] == "system: Be brief\n\nuser: abc\n\nassistant: syst"


BLOCKING = {
    "cell": "value = {}",
    "cell that awaits": "await asyncio.sleep(0)\nvalue = {}",
    "function": "def ask():\n    return {}\nvalue = ask()",
    "loop": "for _ in range(2):\n    value = {}",
    "timed": "%%time\nvalue = {}",
}


@pytest.mark.parametrize("code", BLOCKING.values(), ids=BLOCKING)
def test_blocking_functions_work_in_any_cell(kernel: KernelSession, code: str) -> None:
    kernel.run("import mlx_nb")

    for call, text in [
        ("mlx_nb.generate('abc', raw=True, max_tokens=4)", "abca"),
        ("mlx_nb.chat('abc', mlx_nb.Conversation(), max_tokens=4)", "user"),
    ]:
        cell = kernel.run(code.format(call))
        assert cell.status == "ok", cell.error
        assert kernel.ask("value.text") == text


def test_their_twins_are_awaited_side_by_side(kernel: KernelSession) -> None:
    kernel.run("import mlx_nb")

    kernel.run(
        "texts = await asyncio.gather(*(mlx_nb.agenerate(c, raw=True, max_tokens=3) for c in 'abc'),"
        " mlx_nb.achat('d', mlx_nb.Conversation(), max_tokens=3))"
    )

    assert kernel.ask("[text.text for text in texts]") == ["aaa", "bbb", "ccc", "use"]


@pytest.mark.parametrize("code", ["{}", "await asyncio.sleep(0)\n{}", "def f():\n    {}\nf()"])
def test_an_interrupt_ends_a_blocking_call_at_once(kernel: KernelSession, code: str) -> None:
    kernel.run("import mlx_nb")
    cell = kernel.send("running = True\n" + code.format("mlx_nb.generate('abc', max_tokens=100_000)"))
    subshell = kernel.new_subshell()
    eventually(
        lambda: (
            "1" in kernel.send("print(engine.get_stats()['num_running'])", subshell_id=subshell).wait().stdout
        )
    )

    sent = kernel.interrupt()
    cell.wait()

    assert cell.done_at - sent < 0.5
    assert cell.error[0] == "KeyboardInterrupt"
    assert kernel.ask("engine.get_stats()['active_requests']") == 0


def test_a_result_is_displayed_as_its_text_and_as_markdown(kernel: KernelSession) -> None:
    kernel.run("import mlx_nb\nformat = get_ipython().display_formatter.format")

    assert kernel.run("mlx_nb.generate('*b* ', raw=True, max_tokens=8)").value == "*b* *b* "
    assert kernel.ask("format(mlx_nb.GenerationOutput('*b*'))[0]") == {
        "text/plain": "*b*",
        "text/markdown": "*b*",
    }
    thought = kernel.ask("format(mlx_nb.GenerationOutput('*b*', reasoning='Hm'))[0]['text/markdown']")
    assert "<summary>Reasoning</summary>" in thought
