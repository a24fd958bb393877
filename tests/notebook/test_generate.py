"""``%mlx_generate`` in a shell without a kernel."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mlx_nb import EngineCore, GenerationOutput
from mlx_nb.backends.fake import text_tokens
from mlx_nb.notebook.result import Result

Run = Callable[[str], Any]
Adopt = Callable[..., EngineCore]


def prompts_seen(adopt: Adopt) -> list[str]:
    """Start an engine; the list it returns gets every prompt."""
    seen: list[str] = []

    def script(request: Any) -> list[int]:
        seen.append(bytes(request.prompt_token_ids).decode())
        return text_tokens("fine")

    adopt(script=script)
    return seen


def test_the_prompt_goes_through_the_chat_template(run: Run, adopt: Adopt) -> None:
    seen = prompts_seen(adopt)

    run("%mlx_generate Hello there")
    run("%mlx_generate --system 'Be brief' Hello there")
    run("%%mlx_generate --raw\nHello\n there\n\n")

    assert seen == [
        "user: Hello there\nassistant: ",
        "system: Be brief\nuser: Hello there\nassistant: ",
        "Hello\n there",
    ]


def test_braces_are_literal_and_values_are_not_expanded_again(run: Run, adopt: Adopt) -> None:
    seen = prompts_seen(adopt)
    run("name = 'World'; template = '{{ name }} {name} $name'")

    run('%%mlx_generate --raw\n{k: v for k in x} {"a": {"b": 1}} {name} $name')
    run("%mlx_generate --raw {name} $name {{ name }} {{ template }}")
    run("%%mlx_generate --raw\n{% if x %} {# y #} {{ name.upper() }}")

    assert seen == [
        '{k: v for k in x} {"a": {"b": 1}} {name} $name',
        "{name} $name World {{ name }} {name} $name",
        "{% if x %} {# y #} WORLD",
    ]


def test_local_variables_and_options_are_filled_in(run: Run, adopt: Adopt) -> None:
    seen = prompts_seen(adopt)

    run(
        "def ask(topic, who):\n    %mlx_generate --system 'You are {{ who }}' About {{ topic }}\nask('cats', 'Bo')"
    )
    value = run("n = 2\nx = %mlx_generate -n {{ n }} hi\nlen(x.tokens)").value

    assert seen[0] == "system: You are Bo\nuser: About cats\nassistant: "
    assert value == 2


@pytest.mark.parametrize(
    "code",
    ["%mlx_generate --raw Is it?", "x = %mlx_generate --raw Is it?", "if 1:\n    %mlx_generate --raw Is it?"],
)
def test_a_line_may_end_in_a_question_mark(run: Run, adopt: Adopt, code: str) -> None:
    seen = prompts_seen(adopt)

    run(code)

    assert seen == ["Is it?"]


def test_help_is_still_to_be_had(run: Run) -> None:
    ran = run("%mlx_generate?")

    assert "Answer a prompt." in ran.out
    assert "--max-tokens N" in ran.out
    assert "Docstring" in run("len?").out


def test_a_semicolon_ends_a_line_and_is_no_part_of_the_prompt(run: Run, adopt: Adopt) -> None:
    seen = prompts_seen(adopt)

    run("%mlx_generate --raw hi;")

    assert seen == ["hi"]


def test_quoted_arguments_stay_whole(run: Run, adopt: Adopt) -> None:
    adopt()

    value = run("%mlx_generate --raw -n 100 --stop 'd e' a b c d e f").value

    assert (value.text, value.finish_reason) == ("a b c ", "stop")


def test_the_answer_and_how_it_went_are_printed(run: Run, adopt: Adopt) -> None:
    adopt(step_s=0.001)

    ran = run("%mlx_generate --raw -n 6 abc")

    answer, note, shown = ran.out.strip().splitlines()
    assert answer == "abcabc"
    assert note.startswith("(6 tokens · ")
    assert "tokens/s · first token after 0.0" in note
    assert note.endswith("length (max tokens))")
    assert shown.endswith("<Result 'abcabc', 6 tokens, length>")
    again = run("%mlx_generate --raw -n 1 abcd")
    assert "1 token · " in again.out
    assert "2 of 4 prompt tokens cached" in again.out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("%mlx_generate", "the prompt is empty: write it in the cell, or after the options of the line"),
        (
            "%%mlx_generate\n  \n",
            "the prompt is empty: write it in the cell, or after the options of the line",
        ),
        ("%mlx_generate -n -3 hi", "max_tokens must be at least 0, got -3"),
        ("%mlx_generate --top-p 2 hi", "top_p must be above 0 and at most 1, got 2.0"),
        ("%mlx_generate --temp 2 hi", "unknown option --temp: did you mean --temperature?"),
        ("%mlx_generate -e other hi", "there is no engine 'other' (running: default)"),
        ("%mlx_generate -o 2x hi", "-o takes the name of a variable, got '2x'"),
        ("%mlx_generate -o class hi", "-o takes the name of a variable, got 'class'"),
        (
            "%mlx_generate --raw --system 'Be brief' hi",
            "--system acts through the chat template: leave it out, or --raw",
        ),
        ("%mlx_generate {{ nam }}", "the prompt uses {{ nam }}, and there is no variable 'nam'"),
        ("%mlx_generate --stop '' hi", "stop must be a non-empty text or several, got ['']"),
        (
            "%%mlx_generate hello\nthere",
            "only options may follow %%mlx_generate, the prompt goes below it; found 'hello'",
        ),
        (
            "%mlx_generate --raw " + "x" * 64,
            "the prompt has 64 tokens, and the model's context ends at 64: shorten it",
        ),
    ],
)
def test_what_can_not_be_asked_is_one_line(run: Run, adopt: Adopt, code: str, message: str) -> None:
    engine = adopt(context_length=64)

    ran = run(code)

    assert ran.err == f"UsageError: {message}\n"
    assert ran.out == ""
    assert engine.get_stats()["num_requests_processed"] == 0


def test_without_an_engine_it_says_what_to_type(run: Run) -> None:
    ran = run("%mlx_generate hi")

    assert ran.err == (
        "UsageError: no engine is running: start one with %mlx_engine start demo (or another model)\n"
    )


def test_a_fault_of_the_engine_is_one_line_and_the_next_prompt_works(run: Run, adopt: Adopt) -> None:
    def script(request: Any) -> Any:
        yield from text_tokens("abc")
        if request.params.max_tokens > 3:
            raise RuntimeError("the model broke")

    adopt(script=script, step_s=0.02)

    broken = run("%mlx_generate hi")
    fine = run("%mlx_generate -n 3 hi")

    assert broken.err == "UsageError: the engine reports RuntimeError: the model broke\n"
    assert broken.out.startswith("ab")
    assert fine.value == "abc"


def test_an_engine_that_was_stopped_says_so(run: Run, adopt: Adopt) -> None:
    adopt().stop_now()

    assert run("%mlx_generate hi").err == (
        "UsageError: engine 'default' is stopped: start it again with %mlx_engine restart default\n"
    )


def test_defaults_come_from_config(run: Run, adopt: Adopt) -> None:
    adopt()
    run("%config MlxMagics.max_tokens = 4")
    assert run("%mlx_generate --raw abcdef").value == "abcd"
    assert run("%mlx_generate --raw -n 2 abcdef").value == "ab"


def test_a_bad_default_is_refused_and_breaks_no_reload(
    run: Run, adopt: Adopt, shell: InteractiveShell
) -> None:
    adopt()
    run("%config MlxMagics.max_tokens = 3")
    run("%config MlxMagics.temperature = -1")
    assert run("%mlx_generate --raw abcdef").value == "abc"

    shell.config.MlxMagics.top_p = 7.0  # as a file of settings may say
    reloaded = run("%reload_ext mlx_nb")

    assert reloaded.error is None
    assert "MlxMagics.top_p = 7.0 is left out: top_p must be above 0" in reloaded.err
    assert run("%mlx_generate --raw abcdef").value == "abc"


def test_a_result_is_a_text_that_can_be_copied_and_kept() -> None:
    result = Result(GenerationOutput("abc", tokens=[1, 2], finish_reason="stop", completion_tokens=2))

    for again in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert (again, again.output, again.tokens) == ("abc", result.output, [1, 2])
    assert f"{result}" == "abc"
    assert repr(result) == "<Result 'abc', 2 tokens, stop>"
