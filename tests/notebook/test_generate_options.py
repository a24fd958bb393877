"""What the options of ``%mlx_generate`` do, in a shell without a kernel."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from models import tiny
from scripts import says, wait_until

from mlx_nb import AsyncEngineCore, EngineCore
from mlx_nb.backends.fake import EOS, text_tokens
from mlx_nb.notebook.result import Result
from mlx_nb.session.session import default_session

Run = Callable[[str], Any]
Adopt = Callable[..., EngineCore]


@pytest.fixture
def requests(adopt: Adopt) -> list[Any]:
    """Every request that an engine gets; it answers "fine"."""
    seen: list[Any] = []

    def script(request: Any) -> list[int]:
        seen.append(request)
        return [*text_tokens("fine"), EOS]

    adopt(script=script)
    return seen


@pytest.fixture
def real(shell: InteractiveShell) -> EngineCore:
    """A tiny real model in the session."""
    core = EngineCore(*tiny())
    default_session().adopt("default", "tiny", AsyncEngineCore.over(core))
    core.wait_ready(30)
    return core


def test_every_sampling_parameter_is_an_option(run: Run, requests: list[Any]) -> None:
    run("bias = {65: -1.5, 66: 2}")
    ran = run(
        "%mlx_generate -n 7 -t 0.5 --top-p 0.8 --top-k 9 --min-p 0.1 --presence-penalty 0.2"
        " --frequency-penalty -0.3 --repetition-penalty 1.1 --repetition-window 64 --stop xx"
        " --stop 'y y' --stop-token-ids 5 --stop-token-ids 6 --seed 11 --logprobs 2"
        " --logit-bias bias --ignore-eos --no-think hi"
    )
    run("""%mlx_generate --logit-bias '{"65": 3}' --think hi""")

    assert ran.error is None
    first, second = (request.params for request in requests)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k, first.min_p) == (
        7,
        0.5,
        0.8,
        9,
        0.1,
    )
    assert (first.presence_penalty, first.frequency_penalty) == (0.2, -0.3)
    assert (first.repetition_penalty, first.repetition_window) == (1.1, 64)
    assert (first.stop, first.stop_token_ids) == (("xx", "y y"), (5, 6))
    assert (first.seed, first.logprobs, first.ignore_eos, first.thinking) == (11, 2, True, False)
    assert first.logit_bias == {65: -1.5, 66: 2}
    assert (second.logit_bias, second.thinking, second.ignore_eos) == ({65: 3}, True, False)


def test_thinking_is_asked_of_the_chat_template(run: Run, requests: list[Any]) -> None:
    for option in ("", "--think ", "--no-think "):
        run(f"%mlx_generate {option}hi")

    assert [bytes(request.prompt_token_ids).decode() for request in requests] == [
        "user: hi\nassistant: ",
        "thinking: on\nuser: hi\nassistant: ",
        "thinking: off\nuser: hi\nassistant: ",
    ]


def test_literal_leaves_braces_alone(run: Run, requests: list[Any]) -> None:
    run("%%mlx_generate --raw --literal\n{{ nothing }} {{ 1 +")
    run("%mlx_generate --raw --stop '{{ x }}' --literal {{ nothing }}")

    assert [request.preview for request in requests] == ["{{ nothing }} {{ 1 +", "{{ nothing }}"]
    assert requests[1].params.stop == ("{{ x }}",)


def test_logprobs_are_kept_in_the_result(run: Run, adopt: Adopt) -> None:
    adopt()

    value = run("%mlx_generate --raw -n 3 --logprobs 1 abc").value

    assert [entry.token_id for entry in value.logprobs] == list(b"abc")
    assert run("%mlx_generate --raw -n 3 abc").value.logprobs is None


def test_count_counts_and_asks_nothing(run: Run, requests: list[Any]) -> None:
    prompt = "user: hi there\nassistant: "

    assert run("%mlx_generate --count hi there").value == len(prompt)
    assert run("%mlx_generate --count --raw hé").value == 3
    assert run("%mlx_generate --count --system 'Be brief' -o counted hi there").value is None
    assert run("counted").value == len("system: Be brief\n" + prompt)
    assert requests == []


def test_quiet_shows_nothing(run: Run, adopt: Adopt) -> None:
    adopt()

    quiet = run("%mlx_generate -q --raw -n 3 -o answer abc")

    assert (quiet.out, quiet.err, run("answer.text").value) == ("", "", "abc")


def test_a_timeout_is_one_line_and_keeps_what_there_is(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.02)

    ran = run("%mlx_generate --raw -n 100000 --timeout 0.3 -o answer abc")

    assert ran.err == "UsageError: the request was not finished within 0.3 s\n"
    kept = run("answer").value
    assert (kept[:3], kept.finish_reason) == ("abc", "error")
    assert core.get_stats()["active_requests"] == 0


def test_json_is_laid_out_when_it_is_valid(run: Run, adopt: Adopt) -> None:
    adopt(script=says('```json\n{"a": [1, "é"]}\n```'))
    ran = run("%mlx_generate -f json hi")
    assert ran.out.startswith('{\n  "a": [\n    1,\n    "é"\n  ]\n}\n(')

    adopt(script=says('{"a": '))
    assert run("%mlx_generate -f json hi").out.startswith('{"a": \n(')


@pytest.mark.parametrize(
    ("style", "text", "bundle"),
    [
        ("markdown", "*a*", {"text/plain": "*a*", "text/markdown": "*a*"}),
        ("text", "*a*", {"text/plain": "*a*"}),
        (
            "json",
            '{"a":1}',
            {"text/plain": '{\n  "a": 1\n}', "text/markdown": '```json\n{\n  "a": 1\n}\n```'},
        ),
        ("json", "{", {"text/plain": "{", "text/markdown": "```json\n{\n```"}),
        ("code", "a = 1", {"text/plain": "a = 1", "text/markdown": "```\na = 1\n```"}),
        ("code", "```py\na\n```", {"text/plain": "```py\na\n```", "text/markdown": "```py\na\n```"}),
        ("code", "a ``` b", {"text/plain": "a ``` b", "text/markdown": "````\na ``` b\n````"}),
    ],
)
def test_formats(run: Run, adopt: Adopt, style: str, text: str, bundle: dict[str, str]) -> None:
    adopt(script=says(text))

    assert run(f"%mlx_generate -f {style} hi").value.bundle() == bundle


def test_a_page_of_the_model_has_no_rights(run: Run, adopt: Adopt) -> None:
    page = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"><script>alert(3)</script>"
    adopt(script=says(f"```html\n{page}\n```"))

    shown = run("%mlx_generate -f html hi").value.bundle()

    frame = re.fullmatch(
        r'<iframe sandbox="" srcdoc="([^"<>]*)" style="[^"<>]*"></iframe>', shown["text/html"]
    )
    assert frame is not None, "no quote and no tag of the model's may stand outside of the frame's page"
    assert frame[1].startswith(
        "&lt;meta http-equiv=&quot;Content-Security-Policy&quot; content=&quot;default-src"
    )
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in frame[1]
    assert "```" not in frame[1]


def test_reasoning_stands_apart_from_the_answer(run: Run, adopt: Adopt) -> None:
    adopt(script=says("<think>\nHm, $x$ </pre> ```\n\nso & so\n</think>\n\nIt is 4."))

    ran = run("%mlx_generate --think 2 + 2?")
    value = ran.value

    assert ran.out.startswith("Reasoning:\n")
    assert "so & so\n" in ran.out
    assert "\nIt is 4.\n(" in ran.out
    assert (value.text.strip(), value.reasoning.strip()[:3]) == ("It is 4.", "Hm,")
    shown = value.bundle()
    assert shown["text/plain"] == "Reasoning:\nHm, $x$ </pre> ```\n\nso & so\n\nIt is 4."
    fold, _, answer = shown["text/markdown"].partition("</details>")
    assert answer.strip() == "It is 4."
    assert fold.startswith("<details><summary>Reasoning</summary>\n\n<pre ")
    assert "Hm, &#36;x&#36; &lt;/pre&gt; ```\n\nso &amp; so</pre>" in fold


@pytest.mark.parametrize("style", ["text", "html"])
def test_reasoning_is_escaped_in_html(run: Run, adopt: Adopt, style: str) -> None:
    adopt(script=says("<think><b>thought</b></think><i>answer</i>"))

    shown = run(f"%mlx_generate -f {style} hi").value.bundle()["text/html"]

    assert "&lt;b&gt;thought&lt;/b&gt;" in shown
    assert "&lt;i&gt;answer&lt;/i&gt;" in shown


def test_several_samples_come_as_a_list(run: Run, adopt: Adopt, real: EngineCore) -> None:
    first = run("%mlx_generate --n 3 --seed 5 -t 1 -n 12 --raw Sphinx of").value
    again = run("%mlx_generate --n 3 --seed 5 -t 1 -n 12 --raw Sphinx of").value
    alone = run("%mlx_generate --seed 5 -t 1 -n 12 --raw Sphinx of").value
    other = run("%mlx_generate --n 2 -t 1 -n 12 --raw Sphinx of").value

    assert isinstance(first, list)
    assert all(isinstance(sample, Result) for sample in first)
    assert first == again
    assert len(set(first)) == 3
    assert first[0] == alone
    assert len(set(other)) == 2


def test_samples_are_shown_one_under_another(run: Run, adopt: Adopt) -> None:
    adopt()

    ran = run("%mlx_generate --n 2 -n 3 --raw -o answers abc")

    lines = ran.out.splitlines()
    assert [lines[0], lines[2]] == ["abc", "abc"]
    assert [lines[1][:10], lines[3][:10]] == ["(1 of 2 · ", "(2 of 2 · "]
    assert run("len(answers)").value == 2


class Structure:
    """Cells that ask a tiny real model for structured output."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def ask(self, options: str) -> Any:
        ran = self._run(f"%mlx_generate -n 60 -t 1 --seed 3 {options} --raw hi")
        assert ran.error is None, ran.err
        return ran.value


@pytest.fixture
def structure(run: Run, real: EngineCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Structure:
    monkeypatch.chdir(tmp_path)
    run("from pydantic import BaseModel\nfrom typing import Literal")
    run("class Answer(BaseModel):\n    mood: Literal['good', 'bad']\n    sure: bool")
    run(
        "schema = Answer.model_json_schema()\nwords = ['one', 'two, three']\ngrammar = 'start: \"yes\" | \"no\"'"
    )
    Path("answer.json").write_text(
        json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                    "additionalProperties": False})
    )  # fmt: skip
    Path("answer.lark").write_text('start: "maybe"')
    return Structure(run)


def test_a_schema_is_a_class_a_dict_a_file_or_text(structure: Structure, run: Run) -> None:
    answer = structure.ask("--schema Answer")
    assert type(answer.parsed).__name__ == "Answer"
    assert answer.parsed.mood in ("good", "bad")
    assert answer.style == "json"

    assert structure.ask("--schema schema").parsed["sure"] in (True, False)
    assert structure.ask("--schema answer.json -f markdown").parsed["a"] in (True, False)
    given = structure.ask("""--schema '{"enum": [7]}'""")
    assert (given.parsed, given.finish_reason) == (7, "stop")


def test_regex_choices_and_grammar(structure: Structure) -> None:
    assert re.fullmatch("[ab]{3}-[0-9]", structure.ask("--regex '[ab]{3}-[0-9]'").parsed)
    assert structure.ask("--choices yes,no").parsed in ("yes", "no")
    assert structure.ask("--choices 'a, b' --choices c").parsed in ("a, b", "c")
    assert structure.ask("--choices words").parsed in ("one", "two, three")
    assert structure.ask("--grammar grammar").parsed in ("yes", "no")
    assert structure.ask("--grammar answer.lark").parsed == "maybe"
    assert structure.ask("""--grammar 'start: "so"'""").parsed == "so"


TOOL = """\
asked = []
def weather(city: str, days: int = 1) -> str:
    '''Tell the weather of a city.'''
    asked.append((city, days))
    if city == 'Atlantis':
        raise LookupError('no such city')
    return f'sunny for {days}'
"""


def calling(*turns: str) -> Callable[[Any], list[int]]:
    """A model that says one of `turns` after another, counted by the results it was told."""

    def script(request: Any) -> list[int]:
        told = bytes(request.prompt_token_ids).decode().count("\ntool: ")
        return [*text_tokens(turns[min(told, len(turns) - 1)]), EOS]

    return script


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'weather', 'arguments': arguments})}</tool_call>"


def test_functions_become_tools_and_calls_are_in_the_result(run: Run, adopt: Adopt) -> None:
    prompts: list[str] = []

    def script(request: Any) -> list[int]:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return [*text_tokens("Let me see. " + call(city="Paris")), EOS]

    adopt(script=script)
    run(TOOL)

    ran = run("%mlx_generate --tools weather How is it in Paris?")

    described, *_ = prompts[0].splitlines()
    assert described.startswith('tool {"name": "weather", "description": "Tell the weather of a city."')
    assert ran.value.text == "Let me see. "
    assert ran.value.tool_calls == [{"name": "weather", "arguments": {"city": "Paris"}}]
    assert (ran.value.finish_reason, ran.value.calls) == ("tool_calls", ())
    assert "→ weather(city='Paris')\n(" in ran.out
    assert run("asked").value == []


def test_calls_are_carried_out_and_the_model_goes_on(run: Run, adopt: Adopt) -> None:
    prompts: list[str] = []
    script = calling("Let me see. " + call(city="Paris", days="2"), "It is sunny.")

    def noted(request: Any) -> list[int]:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return script(request)

    adopt(script=noted)
    run(TOOL)

    ran = run("%mlx_generate --system 'Be brief' --tools weather --call In Paris?")

    assert prompts[1].splitlines()[1:] == [
        "system: Be brief",
        "user: In Paris?",
        f"assistant: Let me see. {call(city='Paris', days='2')}",
        "tool: sunny for 2",
        "assistant: ",
    ]
    assert ran.value.text == "It is sunny."
    assert [str(called) for called in ran.value.calls] == ["weather(city='Paris', days='2') → sunny for 2"]
    assert ran.value.tool_calls == []
    assert run("asked").value == [("Paris", 2)]
    assert "Let me see. \n→ weather(city='Paris', days='2') → sunny for 2\n\nIt is sunny.\n(" in ran.out
    assert "after 1 call · stop" in ran.out


def test_a_call_that_fails_is_told_and_shown(run: Run, adopt: Adopt) -> None:
    adopt(script=calling(call(city="Atlantis"), call(town="Paris"), "Sorry."))
    run(TOOL)

    value = run("%mlx_generate --tools weather --call hi").value

    assert [called.content for called in value.calls] == [
        "error: LookupError: no such city",
        "error: weather takes no 'town'; it takes city, days",
    ]
    assert value == "Sorry."


def test_a_result_that_can_not_be_written_down_is_a_failed_call(run: Run, adopt: Adopt) -> None:
    adopt(script=calling(call(city="Paris"), "Sorry."))
    run(
        "class Mute:\n    def __repr__(self):\n        raise RuntimeError('mute')\n"
        "def weather(city):\n    return Mute()"
    )

    value = run("%mlx_generate --tools weather --call hi").value

    assert (value, value.calls[0].content) == ("Sorry.", "error: RuntimeError: mute")


def test_several_calls_of_a_turn_are_all_answered(run: Run, adopt: Adopt) -> None:
    adopt(script=calling(call(city="Paris") + call(city="Rome", days=2), "never", "Both are sunny."))
    run(TOOL)

    value = run("%mlx_generate --tools weather --call hi").value

    assert (value, run("asked").value) == ("Both are sunny.", [("Paris", 1), ("Rome", 2)])


def test_calls_are_bounded(run: Run, adopt: Adopt) -> None:
    adopt(script=calling(call(city="Paris")))
    run(TOOL)

    ran = run("%mlx_generate --tools weather --call --max-calls 2 hi")

    assert len(run("asked").value) == len(ran.value.calls) == 2
    assert ran.value.tool_calls == [{"name": "weather", "arguments": {"city": "Paris"}}]
    assert "after 2 calls · calls a tool (--max-calls 2)" in ran.out
    assert len(run("%mlx_generate --tools weather --call hi").value.calls) == 5


def test_async_functions_are_tools_as_well(run: Run, adopt: Adopt) -> None:
    adopt(script=calling('<tool_call>{"name": "wait", "arguments": {}}</tool_call>', "Done."))
    run("import asyncio\nasync def wait():\n    await asyncio.sleep(0.01)\n    return 'waited'")

    value = run("%mlx_generate --tools wait --call hi").value

    assert (value, value.calls[0].content) == ("Done.", "waited")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--format pdf", "--format takes markdown|text|json|code|html, got 'pdf'"),
        ("--schema Nothing", "--schema takes a Pydantic class, a dict or a file, and there is no 'Nothing'"),
        ("--schema number", "schema must be a JSON schema (dict or JSON text) or a Pydantic model, got 3"),
        ("--schema '{oops'", "schema is not JSON: "),
        ("--regex a --choices b,c", "regex and choices exclude each other; give one"),
        ("--choices ,", "choices must be a list of non-empty texts, got []"),
        ("--grammar nothing", "--grammar takes a text or a file, and there is no 'nothing'"),
        ("--grammar number", "--grammar takes a text or a file, and number is a int"),
        ("--logit-bias nothing", "--logit-bias takes a dict of token ids, and there is no 'nothing'"),
        ("--logit-bias '{oops'", "--logit-bias is no JSON: "),
        ("--logit-bias '{\"a\": 1}'", "--logit-bias takes a dict of token ids, got {'a': 1}"),
        ("--logit-bias number", "--logit-bias takes a dict of token ids, got 3"),
        ("--tools nothing", "--tools takes a function, and there is no 'nothing'"),
        ("--tools weathr", "--tools takes a function, and there is no 'weathr'; did you mean 'weather'?"),
        ("--tools number", "--tools takes functions, and number is a int"),
        ("--tools ,", "--tools takes names of functions"),
        ("--tools weather.nothing", "--tools takes a function, and there is no 'weather.nothing'"),
        ("--call", "--call needs --tools"),
        ("--tools weather --max-calls 3", "--max-calls needs --call"),
        ("--tools weather --call --max-calls 0", "max_calls must be at least 1, got 0"),
        ("--tools weather --call --n 2", "--n and --call exclude each other: leave one out"),
        ("--tools weather --regex a", "--tools and --regex exclude each other: leave one out"),
        ("--tools weather --raw", "--raw and --tools exclude each other: leave one out"),
        ("--think --no-think", "--think and --no-think exclude each other: leave one out"),
        ("--raw --think", "--raw and --think exclude each other: leave one out"),
        ("--n 0", "n must be 1 to 64, got 0"),
        ("--n 2 -t 0", "with temperature 0 all answers are the same: raise -t, or leave --n out"),
        ("-o get_ipython", "-o takes the name of a variable, got 'get_ipython'"),
        ("--timeout -1", "timeout must be at least 0, got -1.0"),
        ("--timeout soon", "--timeout takes a number, got 'soon'"),
        ("--presence-penalty 3", "presence_penalty must be -2 to 2, got 3.0"),
        ("--logprobs 65", "logprobs must be 0 to 64, got 65"),
        ("--repetition-window 0", "repetition_window must be at least 1, got 0"),
        ("--stop-token-ids x", "--stop-token-ids takes a whole number, got 'x'"),
        ("--ignore-eos --regex a", "ignore_eos can't go with regex: its answer ends where it is complete"),
    ],
)
def test_a_bad_option_is_one_line(run: Run, adopt: Adopt, options: str, message: str) -> None:
    engine = adopt()
    run(TOOL + "number = 3")

    ran = run(f"%mlx_generate {options} hi")

    assert ran.err.startswith(f"UsageError: {message}")
    assert ran.err.count("\n") == 1
    assert ran.out == ""
    assert engine.get_stats()["num_requests_processed"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tools weather", "this model can't call tools: leave tools out, or start one that can"),
        ("--think", "this model doesn't think before it answers: leave thinking out"),
    ],
)
def test_what_the_model_can_not_do_is_one_line(
    run: Run, real: EngineCore, options: str, message: str
) -> None:
    run(TOOL)

    assert run(f"%mlx_generate {options} hi").err == f"UsageError: {message}\n"
    assert run(f"%mlx_generate --count {options} hi").err == f"UsageError: {message}\n"


def test_a_background_answer_is_a_handle(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.01)

    begun = time.monotonic()
    handle = run("%mlx_generate --bg --raw -n 40 abc").value

    assert time.monotonic() - begun < 0.3
    assert repr(handle).startswith("<answer in the background: running, ")
    wait_until(lambda: handle.text.startswith("abc"))
    assert not handle.done
    with pytest.raises(TimeoutError, match=r"the answer is not complete after 0.01 s; it goes on"):
        handle.result(0.01)
    assert handle.result(10) == ("abc" * 14)[:40]
    assert repr(handle) == "<answer in the background: length, 40 tokens>"
    assert (handle.done, handle.abort()) == (True, False)
    assert core.get_stats()["active_requests"] == 0


def test_a_background_answer_can_be_aborted_and_awaited(run: Run, adopt: Adopt) -> None:
    core = adopt(step_s=0.005)

    run("%mlx_generate --bg --raw -n 100000 -o handle abc")
    handle = run("handle").value
    wait_until(lambda: len(handle.text) > 5)
    assert handle.abort()
    value = run("await handle").value

    assert (value.finish_reason, value[:3]) == ("abort", "abc")
    assert core.get_stats()["active_requests"] == 0


def test_background_answers_of_several_samples_and_tools(run: Run, adopt: Adopt) -> None:
    adopt(script=calling(call(city="Paris"), "Sunny."))
    run(TOOL)

    called = run("%mlx_generate --bg --tools weather --call hi").value.result(10)
    both = run("%mlx_generate --bg --n 2 hi").value

    assert (called, len(called.calls)) == ("Sunny.", 1)
    assert len(both.result(10)) == len(both.text) == 2


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for(run: Run, adopt: Adopt) -> None:
    def breaks(request: Any) -> Iterator[int]:
        yield from text_tokens("ab")
        raise RuntimeError("the model broke")

    adopt(script=breaks)
    refused = run("%mlx_generate --bg " + "x" * 5000)
    handle = run("%mlx_generate --bg hi").value
    late = run("%mlx_generate --bg --timeout 0 hi").value

    assert refused.err.startswith("UsageError: the prompt has 5,0")
    with pytest.raises(RuntimeError, match="the model broke"):
        handle.result(10)
    assert repr(handle).startswith("<answer in the background: failed (the model broke), ")
    with pytest.raises(TimeoutError, match="was not finished within"):
        late.result(10)


def test_a_fault_in_the_background_changes_no_variable(run: Run, adopt: Adopt) -> None:
    adopt(step_s=0.005)

    run("%mlx_generate --bg --raw -n 100000 --timeout 0.2 -o handle abc")
    handle = run("handle").value
    wait_until(lambda: handle.done)

    assert handle.text.startswith("abc")
    assert run("handle.result").value == handle.result, "the handle is still there"
    with pytest.raises(TimeoutError):
        run("handle").value.result(1)
