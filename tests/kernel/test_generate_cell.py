"""Magics in a live kernel: where answers go, what they leave behind, and where they may be called from."""

import pytest
from kernel_session import KernelSession, eventually

pytestmark = pytest.mark.kernel


def test_an_answer_streams_as_markdown_into_one_display_of_its_cell(kernel: KernelSession) -> None:
    cell = kernel.run("%%mlx_generate -n 60 --raw\nabc*d* ")

    answer, note = cell.displays
    assert answer == {"text/plain": "abc*d* " * 8 + "abc*", "text/markdown": "abc*d* " * 8 + "abc*"}
    assert note["text/plain"].startswith("60 tokens · ")
    assert "length" in note["text/plain"]
    assert len(cell.drawn_at) > 3
    assert cell.value is None, "the answer stands there already"


def test_displays_are_updated_ten_times_a_second_at_most(kernel: KernelSession) -> None:
    kernel.run("fast = adopt('fast', step_s=0.002); default_session().use('default')")

    cell = kernel.run("%mlx_generate -e fast -n 400 --raw abc")

    *live, _last = cell.drawn_at
    assert len(live) >= 4
    assert (live[-1] - live[0]) / (len(live) - 1) > 0.09


def test_model_text_is_never_html_of_ours(kernel: KernelSession) -> None:
    cell = kernel.run("%mlx_generate -n 24 --raw <b onclick='x()'>hi</b>")

    answer, note = cell.displays
    assert set(answer) == {"text/plain", "text/markdown"}
    assert "onclick" not in note["text/html"]


def test_the_answer_is_the_value_of_the_cell(kernel: KernelSession) -> None:
    kernel.run("%%mlx_generate -n 6 --raw\nabc")
    assert kernel.ask("(str(_), _.finish_reason, _.output.completion_tokens)") == ("abcabc", "length", 6)

    kernel.run("%mlx_generate -n 3 --raw abc")
    later = kernel.run("_")
    assert later.texts == ["abc"]

    kernel.run("answer = %mlx_generate -n 4 --raw abc")
    assert kernel.ask("answer.text") == "abca"


def test_the_answer_goes_into_a_variable(kernel: KernelSession) -> None:
    kernel.run("%%mlx_generate -n 5 --raw -o answer\nxyz")

    assert kernel.ask("(answer.text, answer.tokens)") == ("xyzxy", list(b"xyzxy"))


def test_a_question_on_a_line_is_not_a_request_for_help(kernel: KernelSession) -> None:
    cell = kernel.run("a = %mlx_generate -n 30 --raw What's the capital of France?")

    assert cell.texts[0] == "What's the capital of France?W"
    assert kernel.run("%mlx_generate?").displays == []


@pytest.mark.parametrize(
    "code",
    [
        "%%time\nvalue = %mlx_generate -n 4 --raw abc",
        "%%time\n%mlx_generate -n 4 --raw abc\nvalue = 'abca'",
        "def asked():\n    x = %mlx_generate -n 4 --raw abc\n    return x\nvalue = asked()",
        "value = [get_ipython().run_line_magic('mlx_generate', '-n 4 --raw abc') for _ in range(1)][0]",
        "import asyncio\nawait asyncio.sleep(0)\nvalue = %mlx_generate -n 4 --raw abc",
        "for i in range(2):\n    value = %mlx_generate -n 4 --raw abc",
        "try:\n    pass\nfinally:\n    if True:\n        value = %mlx_generate -n 4 --raw abc",
        "%%timeit -n1 -r1\n%mlx_generate -n 4 -o value --raw abc",
    ],
    ids=["time", "time-statement", "function", "expression", "await", "loop", "blocks", "timeit"],
)
def test_it_works_wherever_it_is_called_from(kernel: KernelSession, code: str) -> None:
    kernel.run("value = None")

    cell = kernel.run(code)

    assert cell.status == "ok", cell.error
    assert cell.texts[0] == "abca"
    assert kernel.ask("str(value)") == "abca"


def test_captured_answers_come_once_and_whole(kernel: KernelSession) -> None:
    cell = kernel.run("%%capture caught\n%mlx_generate -n 30 --raw -o kept abc")
    assert (cell.texts, cell.error) == ([], ("", ""))
    assert kernel.ask("kept.text") == "abc" * 10

    answer, note = kernel.ask("[o.data['text/plain'] for o in caught.outputs if o.data]")
    assert answer == "abc" * 10
    assert note.startswith("30 tokens")


def test_the_loop_goes_on_while_a_cell_awaits_its_answer(kernel: KernelSession) -> None:
    kernel.run(
        "ticks = []\nasync def tick():\n    while True:\n        ticks.append(1); await asyncio.sleep(0.01)"
    )
    kernel.run("ticking = asyncio.create_task(tick())")
    before = kernel.ask("len(ticks)")

    kernel.run("%mlx_generate -n 50 --raw abc\nnow = len(ticks)")

    assert kernel.ask("now") > before + 15
    kernel.run("ticking.cancel()")


def test_generation_goes_on_while_a_cell_sleeps(kernel: KernelSession) -> None:
    kernel.run("steady = adopt('steady', step_s=0.02); default_session().use('default')")
    kernel.run(
        "from mlx_nb import SamplingParams\n"
        "answering = asyncio.create_task(steady.generate('abc', SamplingParams(max_tokens=100000)))"
    )
    eventually(lambda: kernel.ask("steady.get_stats()['total_completion_tokens']") > 0)

    kernel.run(
        "before = steady.get_stats()['total_completion_tokens']\ntime.sleep(5)\n"
        "after = steady.get_stats()['total_completion_tokens']"
    )

    assert kernel.ask("after - before") > 150
    kernel.run("answering.cancel()")
    eventually(lambda: kernel.ask("steady.get_stats()['active_requests']") == 0)


def test_streams_of_two_cells_stay_in_their_own(kernel: KernelSession) -> None:
    subshell = kernel.new_subshell()
    first = kernel.send("%mlx_generate -n 80 --raw abc")
    eventually(lambda: first.texts and first.texts[0] != "…")

    second = kernel.send("%mlx_generate -n 40 --raw xyz", subshell_id=subshell).wait()

    assert not first.replied.is_set(), "they were to overlap"
    first.wait()
    assert first.texts[0] == ("abc" * 27)[:80]
    assert second.texts[0] == ("xyz" * 14)[:40]
    assert len(first.displays) == len(second.displays) == 2


def test_a_stream_in_a_thread_ends_where_it_began(kernel: KernelSession) -> None:
    first = kernel.run(
        "import threading\nask = get_ipython().run_line_magic\n"
        "thread = threading.Thread(target=ask, args=('mlx_generate', '-n 60 --raw abc'))\n"
        "thread.start(); time.sleep(0.2)"
    )

    second = kernel.run("%mlx_generate -n 20 --raw xyz\nthread.join()")

    assert eventually(lambda: first.texts[0] == "abc" * 20)
    assert second.texts[0] == ("xyz" * 7)[:20]


def test_run_all_stops_at_a_bad_line(kernel: KernelSession) -> None:
    bad = kernel.send("%mlx_generate --temprature 1 hi")
    after = kernel.send("went_on = True")

    assert bad.wait().status == "error"
    assert bad.stderr == "UsageError: unknown option --temprature: did you mean --temperature?\n"
    assert after.wait().status == "aborted"
