"""How a magic's line is read."""

import pytest
from IPython.core.error import UsageError

from mlx_nb.notebook.arguments import Option, Options

OPTIONS = Options(
    "%ask [options] prompt",
    Option("-n --max-tokens", "how many", "N", int),
    Option("-t --temperature", "how wild", "T", float),
    Option("--stop", "where to stop", "TEXT", many=True),
    Option("--system", "who you are", "TEXT"),
    Option("--raw", "as it is"),
)


@pytest.mark.parametrize(
    ("line", "values", "prompt"),
    [
        ("What's 2 + 2?", {}, "What's 2 + 2?"),
        ("-n 5 --raw it's {a} 'b  c'", {"max_tokens": 5, "raw": True}, "it's {a} 'b  c'"),
        ("-n5 -t0.5 x", {"max_tokens": 5, "temperature": 0.5}, "x"),
        ("--max-tokens=5 x", {"max_tokens": 5}, "x"),
        ("-n -5 x", {"max_tokens": -5}, "x"),
        ("x -n 5", {}, "x -n 5"),
        ("-5 is a number", {}, "-5 is a number"),
        ("- a list", {}, "- a list"),
        ("--raw -- -n is an option", {"raw": True}, "-n is an option"),
        ("--system 'You are \"it\"' x", {"system": 'You are "it"'}, "x"),
        ('--system "You\'re it" x', {"system": "You're it"}, "x"),
        ('--system="You are it" x', {"system": "You are it"}, "x"),
        (r'--stop "\n\n" --stop \n --stop "a\"b\\" x', {"stop": ["\n\n", r"\n", 'a"b\\']}, "x"),
        ("--stop '' x", {"stop": [""]}, "x"),
        ("", {}, ""),
    ],
)
def test_options_stand_before_the_prompt(line: str, values: dict[str, object], prompt: str) -> None:
    assert OPTIONS.before_prompt(line) == (values, prompt)


def test_values_are_filled_in_before_they_are_converted() -> None:
    values, prompt = OPTIONS.before_prompt(
        "-n {{ n + 1 }} {{ n }}", lambda text: text.replace("{{ n + 1 }}", "8")
    )

    assert (values, prompt) == ({"max_tokens": 8}, "{{ n }}")


def test_options_may_stand_anywhere_among_words() -> None:
    assert OPTIONS.with_words("a -n 5 'b c' --raw ~/d") == (
        {"max_tokens": 5, "raw": True},
        ["a", "b c", "~/d"],
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-token 5 x", "unknown option --max-token: did you mean --max-tokens?"),
        ("--max_tokens 5 x", "unknown option --max_tokens: did you mean --max-tokens?"),
        ("-x", "unknown option -x: known are -n, --max-tokens, -t, --temperature, --stop, --system, --raw"),
        ("--temp 1 x", "unknown option --temp: did you mean --temperature?"),
        ("-n", "-n needs a value: -n N"),
        ("-n many x", "-n takes a whole number, got 'many'"),
        ("-t warm x", "-t takes a number, got 'warm'"),
        ("-n 5 --max-tokens 6", "--max-tokens is given twice"),
        ("--raw=yes", "--raw takes no value"),
        ("--system 'open", "a quote is not closed: 'open"),
    ],
)
def test_what_is_not_understood_is_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        OPTIONS.before_prompt(line)

    assert str(caught.value) == message


def test_the_help_has_a_line_for_each_option() -> None:
    lines = OPTIONS.help().splitlines()

    assert lines[0] == "%ask [options] prompt"
    assert lines[1] == "  -n, --max-tokens N   how many"
    assert len(lines) == 6
