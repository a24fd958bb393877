"""DataFrames of Polars and Arrow: what comes in comes back in kind."""

import pandas as pd
import pytest

import mlx_nb
from mlx_nb import GenerationInterrupted, RequestError

from .conftest import Adopt, question_of, repeat

pl = pytest.importorskip("polars")


def test_a_polars_frame_comes_back(engine) -> None:
    frame = pl.DataFrame({"text": ["a", None, "fail", ""], "n": [1, 2, 3, None]})

    result = mlx_nb.generate_frame(frame, "{{ text }}", progress=False)

    assert isinstance(result, pl.DataFrame)
    assert result["text"].to_list() == ["A", None, None, None]
    assert result["state"].to_list() == ["done", "skipped", "failed", "skipped"]
    assert result["error"].to_list()[:2] == [None, "'text' is null"]
    assert result.schema["prompt_tokens"] == pl.Int64
    assert result.schema["total_s"] == pl.Float64
    assert result.schema["state"] == pl.Enum(["done", "truncated", "skipped", "failed", "aborted"])


async def test_the_source_stays_as_it_was(adopt: Adopt) -> None:
    adopt(structured=True)
    frame = pl.DataFrame(
        {"text": pl.Series(["a", "b"], dtype=pl.Categorical), "list": [[1], [2, 3]], "x": [float("nan"), 1.0]}
    )

    into = await mlx_nb.agenerate_frame(frame, "{{ text }}", into="loud", progress=False)
    long = mlx_nb.generate_frame(frame, "{{ text }}", n=2, temperature=1, into="loud", progress=False)
    alone = mlx_nb.generate_frame(frame, "{{ x }}", progress=False)

    assert into.columns == ["text", "list", "x", "loud", "loud_error"]
    assert into.select("text", "list").equals(frame.select("text", "list"))
    assert into.schema["text"] == frame.schema["text"]
    assert into["loud"].to_list() == ["A", "B"]
    assert long["list"].to_list() == [[1], [1], [2, 3], [2, 3]]
    assert long["sample"].to_list() == [0, 1, 0, 1]
    assert alone["state"].to_list() == ["skipped", "done"]
    with pytest.raises(RequestError, match="there is a column 'list' already"):
        mlx_nb.generate_frame(frame, "{{ text }}", into="list")


def test_fields_have_the_types_of_polars(adopt: Adopt) -> None:
    adopt(repeat, structured=True)
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"enum": ["x", "y"]},
            "c": {"type": "array", "items": {"type": "string"}},
            "d": {"type": "boolean"},
            "e": {},
            "f": {"enum": [1, 2]},
        },
    }
    said = ['{"a": 1, "b": "y", "c": ["q"], "d": true, "e": 1, "f": 2}', '{"e": "t"}', "{"]

    result = mlx_nb.generate_frame(
        pl.DataFrame({"said": said}), "{{ said }}", schema=schema, parsed=True, progress=False
    )

    assert result["a"].to_list() == [1, None, None]
    assert result.schema["b"] == pl.Enum(["x", "y"])
    assert result.schema["c"] == pl.List(pl.String)
    assert result.schema["d"] == pl.Boolean
    assert result["e"].to_list() == [1, "t", None]
    assert result.schema["f"] == pl.Int64
    assert result["parsed"][1]["e"] == "t"


def test_a_polars_series_goes_by_its_name(engine) -> None:
    named = mlx_nb.generate_frame(pl.Series("word", ["a"]), "<{{ word }}>", into="loud", progress=False)
    unnamed = mlx_nb.generate_frame(pl.Series(["a", None]), progress=False)

    assert named.to_dicts() == [{"word": "a", "loud": "<A>", "loud_error": None}]
    assert unnamed["text"].to_list() == ["A", None]
    with pytest.raises(RequestError, match="holds no text"):
        mlx_nb.generate_frame(pl.Series("n", [1, 2]), progress=False)


def test_an_empty_polars_frame_has_the_same_columns(engine) -> None:
    some = mlx_nb.generate_frame(pl.DataFrame({"text": ["a"]}), "{{ text }}", progress=False)
    none = mlx_nb.generate_frame(
        pl.DataFrame({"text": []}, schema={"text": pl.String}), "{{ text }}", progress=False
    )

    assert none.schema == some.schema
    assert len(none) == 0


def test_tools_give_polars_frames_too(adopt: Adopt) -> None:
    adopt(lambda request: b"yes", structured=True)
    frame = pl.DataFrame({"q": ["a", None]})

    labels = mlx_nb.classify_frame(frame, ["yes", "no"], "{{ q }}", progress=False)
    scores = mlx_nb.score_frame(frame, "{{ q }}", ["yes", "non"], progress=False)

    assert labels["label"].to_list() == ["yes", None]
    assert labels.schema["label"] == pl.Enum(["yes", "no"])
    assert scores["yes"].to_list() == [0.0, None]


def test_a_polars_series_has_a_template_too(adopt: Adopt) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(question_of(request)) or b"yes", structured=True)

    for series in (pl.Series("q", ["fine"]), pl.Series(["fine"])):
        mlx_nb.classify_frame(series, ["yes", "no"], progress=False)

    assert asked == ["Which of these describes the text best: yes, no?\n\nText: fine"] * 2


def test_an_interrupt_leaves_a_polars_frame(engine) -> None:
    class Interrupting:
        """A value whose printing is interrupted."""

        def __str__(self) -> str:
            raise KeyboardInterrupt

    frame = pl.DataFrame({"q": pl.Series([Interrupting()], dtype=pl.Object)})

    with pytest.raises(GenerationInterrupted) as caught:
        mlx_nb.generate_frame(frame, "{{ q }}", progress=False)

    assert isinstance(caught.value.partial, pl.DataFrame)
    assert caught.value.partial["state"].to_list() == ["aborted"]


def test_a_lazy_frame_is_to_be_collected_first(engine) -> None:
    with pytest.raises(RequestError, match=r"collect\(\) it first"):
        mlx_nb.generate_frame(pl.LazyFrame({"text": ["a"]}), "{{ text }}")


def test_an_arrow_table_comes_back(engine) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"text": ["a", None], "n": [1, 2]})

    result = mlx_nb.generate_frame(table, "{{ text }}", into="loud", progress=False)

    assert isinstance(result, pa.Table)
    assert result.to_pydict() == {
        "text": ["a", None],
        "n": [1, 2],
        "loud": ["A", None],
        "loud_error": [None, "'text' is null"],
    }


def test_without_narwhals_one_line_says_what_to_install(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "narwhals.stable.v2", None)

    with pytest.raises(RequestError, match=r"needs narwhals: pip install 'mlx-nb\[polars\]'"):
        mlx_nb.generate_frame(pl.DataFrame({"text": ["a"]}), "{{ text }}")
    assert mlx_nb.generate_frame(pd.Series(["a"]), progress=False)["text"].tolist() == ["A"]
