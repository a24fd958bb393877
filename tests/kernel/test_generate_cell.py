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
    cell = kernel.run("%mlx_generate -n 23 --raw <b onclick='x()'>hi</b>")

    answer, note = cell.displays
    assert answer == {
        "text/plain": "<b onclick='x()'>hi</b>",
        "text/markdown": "&lt;b onclick='x()'>hi&lt;/b>",
    }
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


SCRIPTS = """\
from mlx_nb.backends.fake import EOS, text_tokens

def says(text):
    return lambda request: [*text_tokens(text), EOS]

def calls(request):
    told = bytes(request.prompt_token_ids).decode().count("\\ntool: ")
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    return [*text_tokens("It is three." if told else "I add." + call), EOS]

adopt("thinking", script=says("<think>One and one, so two, I think.</think>Two."), step_s=0.02)
adopt("calling", script=calls, step_s=0.002)
default_session().use("default")

def add(a: int, b: int) -> int:
    return a + b

async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0.01)
    return a + b
"""


def test_reasoning_folds_while_it_streams_and_afterwards(kernel: KernelSession) -> None:
    kernel.run(SCRIPTS)

    cell = kernel.send("%mlx_generate -e thinking hi")
    live = eventually(
        lambda: next((d for d in cell.displays if "<details" in d.get("text/markdown", "")), None)
    )

    assert live["text/markdown"].startswith("<details open><summary>Reasoning</summary>")
    cell.wait()
    whole, note = cell.displays
    assert whole["text/plain"] == "Reasoning:\nOne and one, so two, I think.\n\nTwo."
    assert whole["text/markdown"].startswith("<details><summary>Reasoning</summary>")
    assert whole["text/markdown"].endswith("</details>\n\n\n\nTwo.")
    assert "stop" in note["text/plain"]
    assert kernel.ask("(_.text, _.reasoning)") == ("Two.", "One and one, so two, I think.")


@pytest.mark.parametrize("head", ["", "%%time\n"], ids=["awaited", "blocking"])
@pytest.mark.parametrize("function", ["add", "add_later"])
def test_each_turn_with_its_calls_has_a_display(kernel: KernelSession, head: str, function: str) -> None:
    kernel.run(SCRIPTS)
    kernel.run(f"calculate = {function}\ncalculate.__name__ = 'add'")

    cell = kernel.run(f"{head}%mlx_generate -e calling --tools calculate --call 1 + 2?")

    first, second, note = cell.displays
    assert first["text/plain"] == "I add.\n\n→ add(a=1, b=2) → 3"
    assert second["text/plain"] == "It is three."
    assert "after 1 call" in note["text/plain"]
    assert kernel.ask("([str(call) for call in _.calls], _.text)") == (["add(a=1, b=2) → 3"], "It is three.")


@pytest.mark.parametrize("head", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_an_interrupt_ends_a_tool_and_the_cell(kernel: KernelSession, head: str) -> None:
    kernel.run(SCRIPTS)
    kernel.run("def add(a: int, b: int) -> int:\n    print('begun')\n    time.sleep(20)")
    cell = kernel.send(f"{head}%mlx_generate -e calling --tools add --call 1 + 2?")
    eventually(lambda: cell.stdout)

    kernel.interrupt()
    cell.wait(10)

    assert cell.status == "error"
    assert cell.error[0] == "KeyboardInterrupt"
    assert kernel.run("%mlx_generate -n 3 --raw abc").texts[0] == "abc"


@pytest.mark.parametrize("head", ["", "%%time\n"], ids=["awaited", "blocking"])
def test_samples_stand_one_under_another_each_with_its_line(kernel: KernelSession, head: str) -> None:
    cell = kernel.run(f"{head}%mlx_generate --n 3 -n 30 --raw abc")

    assert cell.texts[::2] == ["abc" * 10] * 3
    assert [text[:9] for text in cell.texts[1::2]] == ["1 of 3 · ", "2 of 3 · ", "3 of 3 · "]
    assert cell.value is None
    assert kernel.ask("[len(_), _[2].text]") == [3, "abc" * 10]
    assert kernel.run("_").texts == ["abc" * 10] * 3


def test_an_interrupt_keeps_what_there_is_of_each_sample(kernel: KernelSession) -> None:
    for head in ("", "%%time\n"):
        cell = kernel.send(f"{head}%mlx_generate --n 2 -n 100000 -o answers --raw abc")
        eventually(lambda cell=cell: "abcabc" in str(cell.texts))

        kernel.interrupt()
        cell.wait()

        assert cell.error[0] == "KeyboardInterrupt"
        assert kernel.ask("[(a.finish_reason, a[:6]) for a in answers]") == [("abort", "abcabc")] * 2


def test_a_background_answer_goes_on_in_its_cell(kernel: KernelSession) -> None:
    first = kernel.run("%mlx_generate --bg -n 120 -o handle --raw abc")
    assert first.texts[1] == "in the background"

    second = kernel.run("before = len(handle.text); time.sleep(0.5); (before, len(handle.text), handle.done)")

    before, after, done = eval(second.value or "")
    assert (after > before + 15, done) == (True, False)
    third = kernel.run("answer = await handle\nanswer.text")
    assert third.value == repr("abc" * 40)
    assert eventually(lambda: first.texts[0] == "abc" * 40)
    assert eventually(lambda: first.texts[1].startswith("120 tokens · "))
    assert second.displays == third.displays == []
    assert kernel.run("answer").texts == ["abc" * 40]


def test_a_background_handle_shows_its_state_in_other_cells(kernel: KernelSession) -> None:
    first = kernel.run("%mlx_generate --bg -n 100000 --raw abc")
    assert (first.value, len(first.displays)) == (None, 2)

    shown = kernel.run("handle = _\nhandle")
    assert shown.texts[0].startswith("<answer in the background: running, ")
    ended = kernel.run("handle.abort(), handle.result(5).finish_reason")
    assert ended.value == "(True, 'abort')"
    assert eventually(lambda: "interrupted" in first.texts[1])


def test_an_interrupted_wait_leaves_a_background_answer_alone(kernel: KernelSession) -> None:
    kernel.run("%mlx_generate --bg -n 100000 -o handle --raw abc")
    for wait in ("await handle", "handle.result()"):
        cell = kernel.send(f"print('begun')\n{wait}")
        eventually(lambda cell=cell: cell.stdout)

        kernel.interrupt()
        cell.wait()

        assert cell.status == "error"
        assert kernel.ask("handle.done") is False
    assert kernel.ask("(handle.abort(), handle.result(5).finish_reason)") == (True, "abort")


def test_a_fault_in_the_background_is_shown_where_it_began(kernel: KernelSession) -> None:
    first = kernel.run("%mlx_generate --bg -n 100000 --timeout 0.3 --raw abc")

    assert eventually(lambda: first.texts[1] == "failed: the request was not finished within 0.3 s")
    assert first.texts[0].startswith("abc")


def test_reading_a_long_prompt_shows_how_far_it_is(kernel: KernelSession) -> None:
    kernel.run("slow = adopt('slow', step_s=0.3, context_length=100000); default_session().use('default')")
    kernel.run("text = 'abc' * 5000")

    for head in ("", "%%time\n"):
        kernel.run("slow.clear_prefix_cache()")
        cell = kernel.send(f"{head}%mlx_generate -e slow -n 2 --raw {{{{ text }}}}")
        assert eventually(
            lambda cell=cell: next((t for t in cell.texts if t.startswith("reading the prompt, ")), None)
        ).endswith(" of 15,000 tokens")
        cell.wait()
        assert cell.texts[0] == "ab"


def test_quiet_and_count_draw_nothing(kernel: KernelSession) -> None:
    quiet = kernel.run("%mlx_generate -q -n 3 --raw abc")
    assert (quiet.displays, quiet.stdout, quiet.value) == ([], "", None)
    assert kernel.ask("_.text") == "abc"
    assert kernel.run("%mlx_generate --count --raw abcd").value == "4"


def test_a_page_is_drawn_as_a_frame_once_it_is_complete(kernel: KernelSession) -> None:
    kernel.run(SCRIPTS)
    kernel.run("adopt('page', script=says('<h1>Hi</h1><script>x</script>'), step_s=0.03)")

    cell = kernel.send("%mlx_generate -e page -f html hi")
    live = eventually(lambda: next((d for d in cell.displays if "<h1>" in d["text/plain"]), None))
    assert set(live) == {"text/plain", "text/markdown"}
    cell.wait()

    assert cell.displays[0]["text/html"].startswith('<iframe sandbox="" srcdoc="&lt;meta ')
    kernel.run("default_session().use('default')")


def test_formats_and_tools_work_in_functions_loops_and_capture(kernel: KernelSession) -> None:
    kernel.run(SCRIPTS)
    kernel.run(
        "def ask(plus):\n    %mlx_generate -q -e calling -o answer --tools plus --call hi\n    return answer\n"
        "answers = [ask(add).text for _ in range(2)]"
    )
    assert kernel.ask("answers") == ["It is three."] * 2

    kernel.run("%%capture seen\n%mlx_generate -e calling --tools add --call hi")
    texts = kernel.ask("[each.data.get('text/plain') for each in seen.outputs]")
    assert texts[:2] == ["I add.\n\n→ add(a=1, b=2) → 3", "It is three."]
