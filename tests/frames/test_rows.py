"""Where a row's prompt comes from: columns of any name, system prompts, conversations, and per-row options."""

import numpy as np
import pandas as pd
import pytest

import mlx_nb
from mlx_nb import EngineNotStarted, RequestError, TemplateError

from .conftest import Adopt, prompt_of

# -- columns of any name ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "template"),
    [
        (["my column"], '{{ row["my column"] }}'),
        (["not"], "{{ row.not }}"),
        (["größe (m²)"], "{{ row['größe (m²)'] | upper }}"),
        ([0], "{{ row[0] }}"),
        ([("a", "b")], "{{ row['a', 'b'] }}"),
        (["n", "other"], "{{ row[('n')] }}"),
        (["items"], "{{ row['items'] }}"),
        (["row"], "{{ row }}"),
        (["text"], "{% for name, value in row.items() %}{{ value }}{% endfor %}"),
    ],
    ids=str,
)
def test_a_column_of_any_name_can_be_written(engine, columns: list, template: str) -> None:
    frame = pd.DataFrame([["a"] * len(columns), [None] * len(columns)])
    frame.columns = pd.MultiIndex.from_tuples(columns) if isinstance(columns[0], tuple) else columns

    result = frame.mlx.generate(template, progress=False)

    assert result["text"].tolist() == ["A", pd.NA]
    assert result["error"][1] == f"{columns[0]!r} is null"


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ('{{ row["my colunm"] }}', "there is no column 'my colunm'; did you mean 'my column'"),
        ("{{ row[1] }}{{ text }}", "there is no column 1$"),
        ('{{ row["twice"] }}', "2 columns 'twice'"),
    ],
)
def test_a_column_that_is_not_there_is_one_line_before_anything_runs(
    engine, template: str, line: str
) -> None:
    frame = pd.DataFrame([["a"] * 4], columns=["my column", "text", "twice", "twice"])

    with pytest.raises(TemplateError, match=line):
        frame.mlx.generate(template)


def test_a_series_is_a_row_of_one_column(engine) -> None:
    result = pd.Series(["a"], name="my text").mlx.generate(
        '{{ row["my text"] }} {{ row["text"] }}', progress=False
    )

    assert result["text"].tolist() == ["A A"]


# -- system prompts and conversations ---------------------------------------------------------------------------


@pytest.fixture
def asked(adopt: Adopt) -> list[str]:
    """Return the prompts that an engine gets."""
    asked: list[str] = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"x")
    return asked


def test_the_system_prompt_is_a_template_too(asked: list[str]) -> None:
    frame = pd.DataFrame({"text": ["a", "b", "c"], "language": ["French", None, "Dutch"]})

    result = frame.mlx.generate("{{ text }}", system="Answer in {{ language }}.", progress=False)

    assert asked == [
        f"system: Answer in {language}.\nuser: {text}\nassistant: "
        for text, language in [("a", "French"), ("c", "Dutch")]
    ]
    assert result["error"].tolist() == [pd.NA, "'language' is null", pd.NA]


def test_a_system_prompt_may_be_all_that_differs(asked: list[str]) -> None:
    frame = pd.DataFrame({"language": ["French"]})

    frame.mlx.generate("Hello.", system="Answer in {{ language }}.", progress=False)

    assert asked == ["system: Answer in French.\nuser: Hello.\nassistant: "]


def say(*contents: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("column", ["chat", mlx_nb.col("chat")], ids=["name", "col"])
def test_a_column_of_messages_takes_the_templates_place(asked: list[str], column: object) -> None:
    chats = [
        [{"role": "system", "content": "Be brief."}, *say("a")],
        say("b", "B", "c"),
        tuple(say("d")),
        np.array(say("e"), dtype=object),
    ]

    result = pd.DataFrame({"chat": chats}).mlx.generate(messages=column, progress=False)

    assert sorted(asked) == [
        "system: Be brief.\nuser: a\nassistant: ",
        "user: b\nassistant: B\nuser: c\nassistant: ",
        "user: d\nassistant: ",
        "user: e\nassistant: ",
    ]
    assert result["state"].tolist() == ["done"] * 4


def test_messages_of_arrow_structs(asked: list[str]) -> None:
    pa = pytest.importorskip("pyarrow")
    chats = pd.Series(pa.array([say("a"), None]), dtype=pd.ArrowDtype(pa.array([say("a")]).type))

    result = pd.DataFrame({"chat": chats}).mlx.generate(messages="chat", progress=False)

    assert asked == ["user: a\nassistant: "]
    assert result["state"].tolist() == ["done", "skipped"]


BAD_MESSAGES = {
    "null": (None, "skipped", "'chat' is null"),
    "empty": ([], "skipped", "there are no messages"),
    "blank question": (say(" "), "skipped", "the last message is empty"),
    "text": ("Hello", "failed", "messages are a list of {role, content}, got str"),
    "number": (3, "failed", "messages are a list of {role, content}, got int"),
    "texts": (["Hello"], "failed", "message 1 is no {role, content}, but str"),
    "no content": ([{"role": "user"}], "failed", "message 1 needs a text as its content, got None"),
    "no role": ([*say("a"), {"content": "b"}], "failed", "message 2 needs a text as its role, got None"),
    "content of parts": (
        [{"role": "user", "content": [1]}],
        "failed",
        "message 1 needs a text as its content, got [1]",
    ),
}


@pytest.mark.parametrize(("chat", "state", "error"), BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_bad_messages_are_their_rows_error(asked: list[str], chat: object, state: str, error: str) -> None:
    result = pd.DataFrame({"chat": [say("a"), chat]}, dtype=object).mlx.generate(
        messages="chat", progress=False
    )

    assert result["state"].tolist() == ["done", state]
    assert result["error"][1] == error
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"messages": "chat", "template": "{{ text }}"}, "leave the template out, or messages"),
        ({"messages": "chat", "system": "x"}, "one of them: leave system out"),
        ({"messages": "chat", "raw": True}, "need the chat template: leave raw out"),
        ({"messages": "chta"}, "there is no column 'chta'; did you mean 'chat'?"),
        ({}, "a template is a text"),
    ],
)
def test_messages_go_with_nothing_that_contradicts_them(engine, options: dict, line: str) -> None:
    with pytest.raises(RequestError, match=line):
        pd.DataFrame({"chat": [say("a")], "text": ["a"]}).mlx.generate(**options)


# -- options from columns ---------------------------------------------------------------------------------------


def test_options_come_from_columns(adopt: Adopt) -> None:
    params = {}
    adopt(lambda request: params.update({prompt_of(request): request.params}) or b"xyxyxyxyxy")
    frame = pd.DataFrame(
        {
            "text": ["a", "b", "c"],
            "most": [2, 4, None],
            "heat": [0.5, None, 1],
            "number": pd.array([7, None, 8], dtype="Int64"),
            "end": [["y"], "x", None],
        }
    )

    result = frame.mlx.generate(
        "{{ text }}",
        raw=True,
        max_tokens=mlx_nb.col("most"),
        temperature=mlx_nb.col("heat"),
        seed=mlx_nb.col("number"),
        stop=mlx_nb.col("end"),
        top_k=5,
        progress=False,
    )

    assert result["text"].tolist() == ["x", "", "xyxyxyxyxy"]
    assert [(p.max_tokens, p.temperature, p.seed, p.stop, p.top_k) for p in map(params.get, "abc")] == [
        (2, 0.5, 7, ("y",), 5),
        (4, 0, None, ("x",), 5),
        (256, 1, 8, (), 5),
    ]


def test_choices_come_from_columns(adopt: Adopt) -> None:
    params = {}
    adopt(lambda request: params.update({prompt_of(request): request.params}) or b"yes", structured=True)
    frame = pd.DataFrame({"text": ["a", "b"], "options": [["yes", "no"], ("yes", "well")]})

    result = frame.mlx.generate("{{ text }}", raw=True, choices=mlx_nb.col("options"), progress=False)

    assert [params[text].choices for text in "ab"] == [("yes", "no"), ("yes", "well")]
    assert result["state"].tolist() == ["done", "done"]


BAD_OPTIONS = {
    "max_tokens": ([3, -1, 2.5, "a"], "max_tokens must be"),
    "temperature": ([0.0, -1, float("inf"), "hot"], "temperature must be"),
    "seed": ([1, -1, 0.5, "a"], "seed must be"),
    "stop": ([["a"], 3, [1], {"a": 1}.values()], "stop must be"),
    "choices": ([None, 3, "yes", []], "choices must be"),
    "schema": ([None, 3, "{", [1]], "schema"),
    "logit_bias": ([None, 3, [1], {"a": 1}], "logit_bias"),
}


@pytest.mark.parametrize(("name", "cells", "line"), [(n, *case) for n, case in BAD_OPTIONS.items()])
def test_a_bad_value_is_its_rows_error(adopt: Adopt, name: str, cells: list, line: str) -> None:
    adopt(structured=True)
    frame = pd.DataFrame({"text": list("abcd"), "value": pd.Series(cells, dtype=object)})

    result = frame.mlx.generate("{{ text }}", progress=False, **{name: mlx_nb.col("value")})

    assert result["state"].tolist() == ["done", "failed", "failed", "failed"]
    assert all(line in error for error in result["error"][1:])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_tokens": mlx_nb.col("mots")}, "there is no column 'mots'; did you mean 'most'?"),
        ({"max_tokns": mlx_nb.col("most")}, "unknown sampling parameter 'max_tokns'"),
        ({"raw": True, "thinking": mlx_nb.col("most")}, "leave them out, or raw"),
        ({"logprobs": 1}, "no column for log-probabilities"),
        ({"logprobs": mlx_nb.col("most")}, "no column for log-probabilities"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_runs(engine, options: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        pd.DataFrame({"text": ["a"], "most": [1]}).mlx.generate("{{ text }}", **options)


# -- who answers ------------------------------------------------------------------------------------------------


def test_a_model_is_chosen_by_name(adopt: Adopt) -> None:
    adopt(lambda request: b"one", name="first", model="org/one")
    adopt(lambda request: b"two", name="second", model="org/two")
    series = pd.Series(["a"])

    answers = [series.mlx.generate(model=name, progress=False)["text"][0] for name in ("org/one", "org/two")]

    assert answers == ["one", "two"]
    with pytest.raises(
        EngineNotStarted, match=r"no engine runs the model 'org/three' \(running: org/one, org/two\)"
    ):
        series.mlx.generate(model="org/three")
    with pytest.raises(RequestError, match="engine and model both choose"):
        series.mlx.generate(model="org/one", engine="first")
