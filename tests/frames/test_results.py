"""What comes back: states, several samples a row, and results beside the source."""

import pandas as pd
import pytest

import mlx_nb
from mlx_nb import GenerationInterrupted, RequestError

from .conftest import Adopt, prompt_of, question_of, repeat

INDEXES = {
    "default": pd.RangeIndex(3),
    "named": pd.Index([7, 8, 9], name="id"),
    "duplicate": pd.Index(["a", "a", "b"]),
    "multi": pd.MultiIndex.from_tuples([("x", 1), ("x", 1), ("y", 2)], names=["group", None]),
    "dates": pd.date_range("2026-01-01", periods=3, freq="D", name="day"),
    "categorical": pd.CategoricalIndex(["u", "v", "u"]),
    "nulls": pd.Index([None, float("nan"), 1.0]),
    "filtered": pd.RangeIndex(6)[[True, False, True, False, False, True]],
}


@pytest.fixture(params=INDEXES.values(), ids=INDEXES.keys())
def frame(request) -> pd.DataFrame:
    """Return a frame with an index of every kind."""
    return pd.DataFrame({"word": ["a", None, "c"], "n": [1, 2, 3]}, index=request.param)


# -- states -----------------------------------------------------------------------------------------------------


def test_every_state_has_its_reason(adopt: Adopt) -> None:
    def script(request):
        if "fail" in question_of(request):
            raise RuntimeError("the script failed")
        return b"long" * 9 if "long" in question_of(request) else b"fine"

    adopt(script)
    words = pd.Series(["a", "long", None, " ", "fail"])

    result = words.mlx.generate(max_tokens=9, progress=False)

    assert result["state"].tolist() == ["done", "truncated", "skipped", "skipped", "failed"]
    assert result["error"].tolist() == [
        pd.NA,
        pd.NA,
        "'text' is null",
        "'text' is empty",
        "RuntimeError: the script failed",
    ]
    assert result["text"].tolist() == ["fine", "longlongl", pd.NA, pd.NA, pd.NA]
    assert result["finish_reason"].tolist() == ["stop", "length", "skipped", "skipped", "error"]
    assert result["total_s"].isna().tolist() == [False, False, True, True, False]
    assert result["state"].cat.categories.tolist() == ["done", "truncated", "skipped", "failed", "aborted"]


# -- several samples --------------------------------------------------------------------------------------------


def numbered(request) -> bytes:
    """Answer with question and seed."""
    return f"{question_of(request)}{request.params.seed}".encode()


def test_samples_are_rows_of_their_own(adopt: Adopt, frame: pd.DataFrame) -> None:
    adopt(numbered)

    result = frame.mlx.generate("{{ word }}", n=2, temperature=1, seed=5, progress=False)

    pd.testing.assert_index_equal(result.index, frame.index.repeat(2), exact=True)
    assert result.columns[:2].tolist() == ["sample", "text"]
    assert result["sample"].tolist() == [0, 1, 0, 1, 0, 1]
    assert result["text"].tolist() == ["a5", "a6", pd.NA, pd.NA, "c5", "c6"]
    assert result["state"].tolist() == ["done", "done", "skipped", "skipped", "done", "done"]


def test_samples_are_columns_of_their_own(adopt: Adopt, frame: pd.DataFrame) -> None:
    adopt(numbered)

    result = frame.mlx.generate("{{ word }}", n=2, shape="wide", temperature=1, seed=5, progress=False)

    pd.testing.assert_index_equal(result.index, frame.index, exact=True)
    assert result["text_0"].tolist() == ["a5", pd.NA, "c5"]
    assert result["text_1"].tolist() == ["a6", pd.NA, "c6"]
    assert result["state_1"].tolist() == ["done", "skipped", "done"]
    assert result["prompt_tokens_1"].dtype == "Int64"


def test_one_sample_has_the_form_of_several(adopt: Adopt) -> None:
    adopt(numbered)
    words = pd.Series(["a"])

    assert words.mlx.generate(n=1, progress=False)["sample"].tolist() == [0]
    assert "text_0" in words.mlx.generate(n=1, shape="wide", progress=False)


def test_seeds_of_columns_count_on_too(adopt: Adopt) -> None:
    adopt(numbered)
    frame = pd.DataFrame({"word": ["a", "b"], "seed": [3, 30]})

    result = frame.mlx.generate(
        "{{ word }}", n=2, temperature=1, seed=mlx_nb.col("seed"), shape="wide", progress=False
    )

    assert result[["text_0", "text_1"]].to_numpy().tolist() == [["a3", "a4"], ["b30", "b31"]]


def test_samples_without_a_seed_are_drawn_apart(adopt: Adopt) -> None:
    seeds = []
    adopt(lambda request: seeds.append(request.seed) or b"x")

    pd.Series(["a"]).mlx.generate(n=4, temperature=1, progress=False)

    assert len(set(seeds)) == 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"n": 2}, "with temperature 0 all answers of a row are the same"),
        ({"n": 0}, "n must be at least 1"),
        ({"n": "2"}, "n must be a whole number"),
        ({"shape": "wide"}, "give n as well"),
        ({"n": 2, "temperature": 1, "shape": "tall"}, "shape must be one of 'long', 'wide'"),
        ({"into": ""}, "into is the name of a column"),
        ({"into": 3}, "into is the name of a column"),
        ({"join": 1}, "join must be True or False"),
    ],
)
def test_options_that_make_no_sense_are_refused(engine, options: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        pd.Series(["a"]).mlx.generate(**options)


# -- beside the source ------------------------------------------------------------------------------------------


def test_answers_go_into_a_copy_of_the_source(engine, frame: pd.DataFrame) -> None:
    before = frame.copy(deep=True)

    result = frame.mlx.generate("{{ word }}", into="loud", progress=False)

    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(result[["word", "n"]], frame)
    assert result.columns.tolist() == ["word", "n", "loud", "loud_error"]
    assert result["loud"].tolist() == ["A", pd.NA, "C"]
    assert result["loud_error"].tolist() == [pd.NA, "'word' is null", pd.NA]


def test_the_whole_result_joins_the_source(engine, frame: pd.DataFrame) -> None:
    result = frame.mlx.generate("{{ word }}", join=True, progress=False)

    pd.testing.assert_frame_equal(result[["word", "n"]], frame)
    assert result.columns[2:5].tolist() == ["text", "state", "error"]
    assert result["text"].tolist() == ["A", pd.NA, "C"]


def test_a_joined_result_may_call_the_answers_something_else(engine) -> None:
    frame = pd.DataFrame({"text": ["a"]})

    result = frame.mlx.generate("{{ text }}", join=True, into="loud", progress=False)

    assert result.columns[:3].tolist() == ["text", "loud", "state"]
    assert result["loud"].tolist() == ["A"]


def test_samples_repeat_their_source(adopt: Adopt, frame: pd.DataFrame) -> None:
    adopt(numbered)
    options = {"n": 2, "temperature": 1, "seed": 1, "progress": False}

    long = frame.mlx.generate("{{ word }}", into="answer", **options)
    wide = frame.mlx.generate("{{ word }}", into="answer", shape="wide", **options)

    pd.testing.assert_index_equal(long.index, frame.index.repeat(2), exact=True)
    assert long.columns.tolist() == ["word", "n", "sample", "answer", "answer_error"]
    assert long["n"].tolist() == [1, 1, 2, 2, 3, 3]
    assert long["answer"].tolist() == ["a1", "a2", pd.NA, pd.NA, "c1", "c2"]
    assert wide.columns.tolist() == ["word", "n", "answer_0", "answer_error_0", "answer_1", "answer_error_1"]
    pd.testing.assert_index_equal(wide.index, frame.index, exact=True)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}}


def test_the_fields_of_a_schema_go_into_the_source(adopt: Adopt) -> None:
    adopt(repeat, structured=True)
    frame = pd.DataFrame({"said": ['{"a": 1, "b": "y"}', '{"a": "z"}']})
    ask = {"schema": SCHEMA, "progress": False}

    result = frame.mlx.generate("{{ said }}", into="it", **ask)
    parsed = frame.mlx.generate("{{ said }}", into="it", parsed=True, **ask)
    joined = frame.mlx.generate("{{ said }}", join=True, **ask)

    assert result.columns.tolist() == ["said", "it.a", "it.b", "it_error"]
    assert result["it.a"].tolist() == [1, pd.NA]
    assert result["it.b"].dtype == pd.CategoricalDtype(["x", "y"])
    assert result["it_error"][1] == "a must be a whole number, got 'z'"
    assert parsed.columns.tolist() == ["said", "it", "it_error"]
    assert parsed["it"].tolist() == [{"a": 1, "b": "y"}, None]
    assert joined.columns[:5].tolist() == ["said", "text", "a", "b", "state"]


def test_an_answer_that_is_no_object_goes_into_one_column(adopt: Adopt) -> None:
    adopt(repeat, structured=True)

    result = pd.DataFrame({"said": ["3"]}).mlx.generate(
        "{{ said }}", schema={"type": "integer"}, into="n", progress=False
    )

    assert (result["n"].tolist(), str(result["n"].dtype)) == ([3], "Int64")


@pytest.mark.parametrize(
    ("columns", "options", "line"),
    [
        (
            ["word", "text"],
            {"join": True},
            "there is a column 'text' already: call the answers something else",
        ),
        (["word", "error", "state"], {"join": True}, "there are columns 'state', 'error' already"),
        (
            ["word", "loud"],
            {"into": "loud"},
            "there is a column 'loud' already: choose another name for into",
        ),
        (["word", "loud_error"], {"into": "loud"}, "there is a column 'loud_error' already"),
        (["word", "sample"], {"into": "x", "n": 2, "temperature": 1}, "there is a column 'sample' already"),
        (
            ["word", "x_1"],
            {"into": "x", "n": 2, "temperature": 1, "shape": "wide"},
            "there is a column 'x_1'",
        ),
        (["word", "x.a"], {"into": "x", "schema": SCHEMA}, "there is a column 'x.a' already"),
        (["word", "b"], {"join": True, "schema": SCHEMA}, "there is a column 'b' already"),
    ],
)
def test_names_that_are_taken_are_refused_before_anything_runs(
    adopt: Adopt, columns: list[str], options: dict, line: str
) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"x", structured=True)

    with pytest.raises(RequestError, match=line):
        pd.DataFrame([["a"] * len(columns)], columns=columns).mlx.generate("{{ word }}", **options)

    assert asked == []


def test_a_series_becomes_a_frame_beside_its_answers(engine) -> None:
    named = pd.Series(["a"], name="my word").mlx.generate(into="loud", progress=False)
    unnamed = pd.Series(["a"]).mlx.generate(into="loud", progress=False)

    assert named.columns.tolist() == ["my word", "loud", "loud_error"]
    assert unnamed.columns.tolist() == ["text", "loud", "loud_error"]


def test_an_empty_frame_gets_its_columns(adopt: Adopt) -> None:
    adopt(structured=True)
    empty = pd.DataFrame({"word": pd.Series([], dtype="string")}, index=pd.Index([], name="id"))

    into = empty.mlx.generate("{{ word }}", into="it", schema=SCHEMA, progress=False)
    long = empty.mlx.generate("{{ word }}", n=2, temperature=1, progress=False)

    assert into.dtypes.astype(str).to_dict() == {
        "word": "string",
        "it.a": "Int64",
        "it.b": "category",
        "it_error": "string",
    }
    assert (len(long), long["sample"].dtype, long.index.name) == (0, "Int64", "id")


def test_columns_with_several_levels_stay(engine) -> None:
    frame = pd.DataFrame([["a", 1]], columns=pd.MultiIndex.from_tuples([("x", "word"), ("x", "n")]))

    result = frame.mlx.generate("{{ row['x', 'word'] }}", into="loud", progress=False)

    assert result["loud"].tolist() == ["A"]
    assert result["x", "n"].tolist() == [1]


def test_an_interrupt_leaves_the_form_as_it_was_to_be(adopt: Adopt) -> None:
    def script(request):
        if "stop" in question_of(request):
            raise KeyboardInterrupt
        return b"fine"

    class Interrupting:
        """A value whose printing is interrupted."""

        def __str__(self) -> str:
            raise KeyboardInterrupt

    adopt(script, batch=1)
    frame = pd.DataFrame({"word": ["a", Interrupting(), "c"]}, index=list("xyz"))

    with pytest.raises(GenerationInterrupted) as caught:
        frame.mlx.generate("{{ word }}", into="it", progress=False)

    assert caught.value.rows == 3
    assert caught.value.partial.columns.tolist() == ["word", "it", "it_error"]
    assert caught.value.partial.index.tolist() == list("xyz")
    assert caught.value.partial["it_error"].tolist()[1:] == ["aborted before it was started"] * 2
