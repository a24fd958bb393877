"""A prompt over a Series or a DataFrame, on an engine without a model."""

import pandas as pd
import pytest

import mlx_nb
import mlx_nb.frames.accessor
from mlx_nb import EngineNotStarted, RequestError, TemplateError

from .conftest import Adopt, prompt_of

DTYPES = {
    "text": "string",
    "state": "category",
    "error": "string",
    "finish_reason": "string",
    "prompt_tokens": "Int64",
    "completion_tokens": "Int64",
    "cached_tokens": "Int64",
    "queue_s": "Float64",
    "ttft_s": "Float64",
    "total_s": "Float64",
}


def dtypes(frame: pd.DataFrame) -> dict[str, str]:
    return {name: str(dtype) for name, dtype in frame.dtypes.items()}


# -- what comes back --------------------------------------------------------------------------------------------


def test_each_row_gets_its_answer_in_order(engine) -> None:
    words = [f"word {i}" for i in range(50)]

    result = pd.Series(words, name="word").mlx.generate("{{ word }}", progress=False)

    assert result["text"].tolist() == [word.upper() for word in words]
    assert set(result["finish_reason"]) == {"stop"}
    assert result["error"].isna().all()
    assert dtypes(result) == DTYPES


def test_order_holds_when_later_rows_end_first(adopt: Adopt) -> None:
    adopt(
        lambda request: b"x" * (40 if "slow" in prompt_of(request) else 1) + prompt_of(request)[-1:].encode(),
        batch=2,
    )
    words = ["slow 0", "1", "2", "3", "slow 4", "5"]

    result = pd.Series(words).mlx.generate(raw=True, progress=False)

    assert [text[-1] for text in result["text"]] == list("012345")


def test_counts_are_those_of_the_engine(engine) -> None:
    result = pd.Series(["héllo"]).mlx.generate(raw=True, max_tokens=3, progress=False)

    assert result.iloc[0, :-3].to_dict() | {"error": None} == {
        "text": "HÉ",
        "state": "truncated",
        "error": None,
        "finish_reason": "length",
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    assert 0 <= result["queue_s"][0] <= result["ttft_s"][0] <= result["total_s"][0] < 60


INDEXES = {
    "default": pd.RangeIndex(3),
    "named": pd.Index([7, 8, 9], name="id"),
    "duplicate": pd.Index(["a", "a", "b"]),
    "multi": pd.MultiIndex.from_tuples([("x", 1), ("x", 1), ("y", 2)], names=["group", None]),
    "dates": pd.date_range("2026-01-01", periods=3, freq="D", name="day"),
    "categorical": pd.CategoricalIndex(["u", "v", "u"]),
    "nulls": pd.Index([None, float("nan"), 1.0]),
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES.keys())
@pytest.mark.parametrize("door", ["series", "frame", "function"])
def test_the_index_is_the_callers(engine, index: pd.Index, door: str) -> None:
    frame = pd.DataFrame({"text": ["a", None, "c"]}, index=index)

    result = {
        "series": lambda: frame["text"].mlx.generate("{{ text }}", progress=False),
        "frame": lambda: frame.mlx.generate("{{ text }}", progress=False),
        "function": lambda: mlx_nb.generate_frame(frame, "{{ text }}", progress=False),
    }[door]()

    pd.testing.assert_index_equal(result.index, index, exact=True)
    assert result["text"].tolist() == ["A", pd.NA, "C"]


def test_a_filtered_frame_gives_the_rows_that_were_left(engine) -> None:
    frame = pd.DataFrame({"text": list("abcd"), "keep": [True, False, True, False]})

    result = frame[frame["keep"]].mlx.generate("{{ text }}", progress=False)

    assert result["text"].to_dict() == {0: "A", 2: "C"}


@pytest.mark.parametrize("dtype", ["object", "string", "category"])
def test_an_empty_frame_gives_an_empty_frame_with_the_same_columns(engine, dtype: str) -> None:
    empty = pd.DataFrame({"text": pd.Series([], dtype=dtype)}, index=pd.Index([], name="id"))

    for result in (
        empty.mlx.generate("{{ text }}", progress=False),
        empty["text"].mlx.generate("{{ text }}", progress=False),
    ):
        assert len(result) == 0
        assert dtypes(result) == DTYPES
        assert result.index.name == "id"


def test_the_callers_frame_is_left_as_it_was(engine) -> None:
    frame = pd.DataFrame({"text": ["a", None]})
    before = frame.copy(deep=True)

    frame.mlx.generate("{{ text }}", progress=False)

    pd.testing.assert_frame_equal(frame, before)


# -- the template -----------------------------------------------------------------------------------------------


def test_a_template_combines_columns_of_any_type(engine) -> None:
    frame = pd.DataFrame({"city": ["Rome"], "people": [3], "when": [pd.Timestamp("2026-01-02")]})

    result = frame.mlx.generate("{{ city | upper }}: {{ people + 1 }}, {{ when.year }}", progress=False)

    assert result["text"].tolist() == ["ROME: 4, 2026"]


def test_blocks_and_single_braces_in_a_template(engine) -> None:
    frame = pd.DataFrame({"text": ["a", "b"], "note": ["x", None]})

    result = frame.mlx.generate('{"k": {{ text }}}{% if note %} note {{ note }}{% endif %}', progress=False)

    assert result["text"].tolist() == ['{"K": A} NOTE X', '{"K": B}']


def test_what_a_cell_holds_is_never_expanded(engine) -> None:
    result = pd.Series(["{{ 1 + 1 }} {% if %} {x}"]).mlx.generate("{{ text }}", progress=False)

    assert result["text"].tolist() == ["{{ 1 + 1 }} {% IF %} {X}"]


@pytest.mark.parametrize("name", [None, 0, "my text", ("a", "b")])
def test_a_series_whose_name_cant_be_written_is_called_text(engine, name: object) -> None:
    result = pd.Series(["a"], name=name).mlx.generate("<{{ text }}>", progress=False)

    assert result["text"].tolist() == ["<A>"]


@pytest.mark.parametrize("name", ["not", "none", "True", "self", "range", "namespace", "my text", None])
def test_a_series_of_any_name_holds_prompts(engine, name: object) -> None:
    assert pd.Series(["a"], name=name).mlx.generate(progress=False)["text"].tolist() == ["A"]


def test_a_series_without_a_template_holds_the_prompts(engine) -> None:
    assert pd.Series(["a", "b"], name="q").mlx.generate(progress=False)["text"].tolist() == ["A", "B"]


FRAME = pd.DataFrame({"text": ["a"], "n": [1]})


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ txt }}", r"there is no column 'txt'; did you mean 'text'\?$"),
        ("{% if nope %}{{ text }}{% endif %}", "there is no column 'nope'$"),
        ("{{ input }}{{ text }}", "there is no column 'input'$"),
        ("{{ text", "can't be read"),
        ("{% if text %}", "can't be read"),
        ("no column", r"names no column.*write {{ text }}"),
        ("", "names no column"),
        (3, "a template is a text.*got int"),
    ],
)
def test_a_bad_template_is_one_line_before_anything_runs(adopt: Adopt, template, line: str) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(request.request_id) or b"x")

    with pytest.raises(TemplateError, match=line) as caught:
        FRAME.mlx.generate(template, progress=False)

    assert "\n" not in str(caught.value)
    assert asked == []


def test_two_columns_of_one_name_are_refused_only_if_the_template_uses_them(engine) -> None:
    frame = pd.DataFrame([["a", "b", "c"]], columns=["x", "x", "y"])

    assert frame.mlx.generate("{{ y }}", progress=False)["text"].tolist() == ["C"]
    with pytest.raises(TemplateError, match="2 columns 'x'"):
        frame.mlx.generate("{{ x }}")


def test_an_expression_that_fails_is_its_rows_error(engine) -> None:
    frame = pd.DataFrame({"n": [1, 0, 2]})

    result = frame.mlx.generate("{{ 4 / n }}", progress=False)

    assert result["text"].tolist() == ["4.0", pd.NA, "2.0"]
    assert result["finish_reason"].tolist() == ["stop", "error", "stop"]
    assert "ZeroDivisionError" in result["error"][1]


# -- dtypes and nulls -------------------------------------------------------------------------------------------


def arrow(kind: str) -> pd.ArrowDtype:
    return pd.ArrowDtype(getattr(pytest.importorskip("pyarrow"), kind)())


TEXT_DTYPES = {
    "object": lambda: object,
    "string": lambda: "string",
    "str": lambda: pd.Series(["a"]).dtype,
    "category": lambda: "category",
    "arrow string": lambda: arrow("string"),
    "arrow large_string": lambda: arrow("large_string"),
}


@pytest.mark.parametrize("dtype", TEXT_DTYPES.values(), ids=TEXT_DTYPES.keys())
def test_text_columns_of_every_dtype_work_and_keep_their_nulls(engine, dtype) -> None:
    texts = pd.Series(["a", None, "", "c"], dtype=dtype())

    result = texts.mlx.generate("{{ text }}", progress=False)

    assert result["text"].tolist() == ["A", pd.NA, pd.NA, "C"]
    assert result["finish_reason"].tolist() == ["stop", "skipped", "skipped", "stop"]
    assert result["error"].tolist() == [pd.NA, "'text' is null", "'text' is empty", pd.NA]


VALUES = {
    "int": (lambda: "int64", [1, 2]),
    "nullable int": (lambda: "Int64", [1, None]),
    "arrow int": (lambda: arrow("int64"), [1, None]),
    "arrow text": (lambda: "string[pyarrow]", ["1", None]),
    "arrow float": (lambda: arrow("float64"), [1.0, None]),
    "arrow bool": (lambda: arrow("bool_"), [True, None]),
    "category of text": (lambda: "category", ["1", None]),
    "category of int": (lambda: "category", [1, None]),
    "float": (lambda: "float64", [1.0, None]),
    "bool": (lambda: "boolean", [True, None]),
    "date": (lambda: "datetime64[ns]", [pd.Timestamp(1), None]),
    "object": (lambda: object, [[1, 2], None]),
}


@pytest.mark.parametrize(("dtype", "values"), VALUES.values(), ids=VALUES.keys())
def test_columns_of_every_dtype_can_be_written_in_a_template(engine, dtype, values: list) -> None:
    frame = pd.DataFrame({"value": pd.Series(values, dtype=dtype())})

    result = frame.mlx.generate("<{{ value }}>", progress=False)

    assert result["text"][0] == f"<{values[0]}>".upper()
    if values[1] is None:
        assert result["error"][1] == "'value' is null"
    else:
        assert result["text"][1] == f"<{values[1]}>"


OTHER_COLUMNS = {
    "int": pd.Series([1], name="n"),
    "float": pd.Series([1.5, float("nan")]),
    "bool": pd.Series([True]),
    "datetime": pd.Series([pd.Timestamp("2026-01-01")]),
    "bytes": pd.Series([b"a"]),
    "object of int": pd.Series([1, 2], dtype=object),
    "category of int": pd.Series([1, 2], dtype="category"),
    "arrow int": pd.Series([1], dtype="Int64"),
}


@pytest.mark.parametrize("column", OTHER_COLUMNS.values(), ids=OTHER_COLUMNS.keys())
def test_a_column_without_text_has_no_accessor(column: pd.Series) -> None:
    assert not hasattr(column, "mlx")
    with pytest.raises(AttributeError, match=r"holds no text .*astype\('string'\)"):
        _ = column.mlx
    with pytest.raises(RequestError, match="holds no text"):
        mlx_nb.generate_frame(column, "{{ text }}")


def test_data_that_is_no_frame_is_refused() -> None:
    with pytest.raises(RequestError, match="DataFrame or a Series is needed, got list"):
        mlx_nb.generate_frame(["a"], "{{ text }}")


@pytest.mark.parametrize("null", [None, float("nan"), pd.NA, pd.NaT], ids=repr)
def test_a_null_never_becomes_a_prompt(adopt: Adopt, null: object) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"x")

    result = pd.Series(["nan", null, "None"], dtype=object).mlx.generate(
        "<{{ text }}>", raw=True, progress=False
    )

    assert sorted(asked) == ["<None>", "<nan>"]
    assert result["finish_reason"].tolist() == ["stop", "skipped", "stop"]
    assert result["prompt_tokens"].tolist() == [5, pd.NA, 6]


@pytest.mark.parametrize(
    "template", ["{{ n }}", "{{ n + 1 }}", "{{ n | upper }}", "{{ n.real }}", "a {{ n ~ 'b' }}"]
)
def test_a_row_is_skipped_however_the_template_uses_its_null(engine, template: str) -> None:
    frame = pd.DataFrame({"n": pd.array([None], dtype="Int64")})

    result = frame.mlx.generate(template, progress=False)

    assert result["finish_reason"].tolist() == ["skipped"]
    assert result["error"].tolist() == ["'n' is null"]


def test_a_template_may_say_what_stands_for_a_null(engine) -> None:
    result = pd.Series([None, "b"]).mlx.generate("{{ text | default('nothing') }}", progress=False)

    assert result["text"].tolist() == ["NOTHING", "B"]


def test_a_prompt_that_comes_out_blank_is_skipped(engine) -> None:
    frame = pd.DataFrame({"note": [None, "x"]})

    result = frame.mlx.generate("{% if note %}{{ note }}{% endif %}", progress=False)

    assert result["error"].tolist() == ["the prompt is empty", pd.NA]


# -- rows that fail ---------------------------------------------------------------------------------------------


def test_a_failing_row_carries_its_error_and_the_others_go_on(engine) -> None:
    result = pd.Series(["a", "fail", "c"]).mlx.generate(progress=False)

    assert result["text"].tolist() == ["A", pd.NA, "C"]
    assert result["finish_reason"].tolist() == ["stop", "error", "stop"]
    assert result["error"].tolist() == [pd.NA, "RuntimeError: the script failed", pd.NA]


def test_an_over_long_prompt_is_its_rows_error(adopt: Adopt) -> None:
    adopt(context_length=40)

    result = pd.Series(["a", "b" * 50, "c"]).mlx.generate(progress=False)

    assert result["text"].tolist() == ["A", pd.NA, "C"]
    assert "context ends at 40" in result["error"][1]


def test_an_engine_that_stops_in_mid_job_leaves_what_was_finished(adopt: Adopt) -> None:
    def script(request):
        if "stop" in prompt_of(request):
            core.stop_soon()
        yield ord("x")

    core = adopt(script, batch=1)

    result = pd.Series(["a", "b", "stop", *"cdefgh"]).mlx.generate(progress=False)

    assert len(result) == 9
    assert result["finish_reason"].tolist()[:2] == ["stop", "stop"]
    assert set(result["finish_reason"][3:]) == {"error"}
    assert result["error"][8]


def test_without_an_engine_one_line_says_how_to_start_one(session) -> None:
    with pytest.raises(
        EngineNotStarted, match=r"^no engine is running: start one with %mlx_engine start"
    ) as caught:
        pd.Series(["a"]).mlx.generate()

    assert "\n" not in str(caught.value)


def test_a_stopped_engine_is_named_before_anything_runs(engine) -> None:
    engine.stop_now()

    with pytest.raises(EngineNotStarted, match="is stopped: start it again with %mlx_engine restart"):
        pd.Series(["a"]).mlx.generate()


# -- options ----------------------------------------------------------------------------------------------------


def test_frames_decode_greedily_unless_told_otherwise(adopt: Adopt) -> None:
    temperatures = []
    adopt(lambda request: temperatures.append(request.params.temperature) or b"x")

    pd.Series(["a"]).mlx.generate(progress=False)
    pd.Series(["a"]).mlx.generate(temperature=0.5, progress=False)

    assert temperatures == [0, 0.5]


def test_system_raw_and_engine_choose_what_is_asked_of_whom(adopt: Adopt) -> None:
    asked = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"first", name="first")
    adopt(lambda request: asked.append(prompt_of(request)) or b"second", name="second")
    series = pd.Series(["a"])

    answers = [
        series.mlx.generate(system="Be brief.", progress=False),
        series.mlx.generate(raw=True, engine="first", progress=False),
    ]

    assert [answer["text"][0] for answer in answers] == ["second", "first"]
    assert asked == ["system: Be brief.\nuser: a\nassistant: ", "a"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"max_tokns": 5}, "unknown sampling parameter 'max_tokns'"),
        ({"raw": True, "system": "x"}, "leave them out, or raw"),
        ({"raw": True, "thinking": True}, "leave them out, or raw"),
        ({"engine": "other"}, "there is no engine 'other'"),
    ],
)
def test_a_bad_option_is_one_line_before_anything_runs(engine, options, line: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=line):
        pd.Series(["a"]).mlx.generate(**options)


def test_max_tokens_0_gives_empty_texts(engine) -> None:
    result = pd.Series(["a"]).mlx.generate(max_tokens=0, progress=False)

    assert (result["text"][0], result["finish_reason"][0]) == ("", "length")


# -- how it runs ------------------------------------------------------------------------------------------------


def test_rows_stream_through_a_bounded_window(adopt: Adopt) -> None:
    core = adopt(batch=4)
    most = 0

    class Watched(str):
        """A text that looks at the engine when a template prints it."""

        __slots__ = ()

        def __str__(self) -> str:
            nonlocal most
            most = max(most, core.get_stats()["active_requests"])
            return str.__str__(self)

    result = pd.Series([Watched(i) for i in range(200)], dtype=object).mlx.generate(
        "{{ text }}", progress=False
    )

    assert result["text"].tolist() == [str(i) for i in range(200)]
    assert 4 <= most <= 8


def test_progress_counts_rows_and_failures(engine, capsys) -> None:
    pd.Series(["a", "fail", None]).mlx.generate()

    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "failed=1" in shown


def test_progress_can_be_switched_off(engine, capsys) -> None:
    pd.Series(["a"]).mlx.generate(progress=False)

    assert capsys.readouterr().err == ""


def test_registering_the_accessors_again_warns_of_nothing() -> None:
    import importlib

    module = importlib.reload(mlx_nb.frames.accessor)

    assert pd.Series.mlx is module.SeriesAccessor
    assert pd.DataFrame.mlx is module.FrameAccessor


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_answers_three_rows(session) -> None:
    session.start("demo")
    places = pd.Series(["France", None, "Japan"], index=[5, 5, 6], name="country")

    result = places.mlx.generate("What is the capital of {{ country }}?", max_tokens=20, progress=False)

    assert result.index.tolist() == [5, 5, 6]
    assert "Paris" in result["text"].iloc[0]
    assert result["finish_reason"].iloc[1] == "skipped"
    assert "Tokyo" in result["text"].iloc[2]
