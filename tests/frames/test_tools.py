"""Classifying, extracting, scoring, and looking before anything runs."""

import json
import math

import pandas as pd
import pytest

import mlx_nb
from mlx_nb import RequestError
from mlx_nb.frames.preview import Preview

from .conftest import Adopt, prompt_of, question_of

# -- classify ---------------------------------------------------------------------------------------------------

LABELS = ["positive", "negative", "mixed"]


def last_word(request) -> bytes:
    """Answer with the question's last word."""
    return question_of(request).split()[-1].encode()


def test_rows_are_sorted_into_labels(adopt: Adopt) -> None:
    adopt(last_word, structured=True)
    reviews = pd.Series(["so negative", None, "quite positive"], index=[3, 3, 4], name="review")

    result = reviews.mlx.classify(LABELS, progress=False)

    assert result["label"].iloc[[0, 2]].tolist() == ["negative", "positive"]
    assert result["label"].isna().tolist() == [False, True, False]
    assert result["label"].dtype == pd.CategoricalDtype(LABELS)
    assert result["state"].tolist() == ["done", "skipped", "done"]
    assert result.index.tolist() == [3, 3, 4]
    assert "text" not in result


def test_a_series_is_asked_which_label_is_best(adopt: Adopt) -> None:
    asked: list[str] = []
    params = []
    adopt(
        lambda request: asked.append(question_of(request)) or params.append(request.params) or b"mixed",
        structured=True,
    )

    pd.Series(["fine"], name="my review").mlx.classify([*LABELS, "{{ x }}"], progress=False)
    pd.DataFrame({"review": ["fine"]}).mlx.classify(LABELS, "Judge: {{ review }}", progress=False)

    assert asked == [
        "Which of these describes the text best: positive, negative, mixed, {{ x }}?\n\nText: fine",
        "Judge: fine",
    ]
    assert [p.choices for p in params] == [(*LABELS, "{{ x }}"), tuple(LABELS)]
    assert {p.temperature for p in params} == {0}


def test_a_label_that_is_cut_off_is_no_label(adopt: Adopt) -> None:
    adopt(last_word, structured=True)

    result = pd.Series(["negative"]).mlx.classify(LABELS, max_tokens=3, into="mood", progress=False)

    assert result["mood"].isna().all()
    assert result["mood_error"].tolist() == ["the answer is cut off at max_tokens"]


async def test_classifying_goes_into_the_source(adopt: Adopt) -> None:
    adopt(last_word, structured=True)
    reviews = pd.DataFrame({"review": ["so negative"]})

    result = await reviews.mlx.aclassify(LABELS, "{{ review }}", into="mood", progress=False)

    assert result.columns.tolist() == ["review", "mood", "mood_error"]
    assert result["mood"].dtype == pd.CategoricalDtype(LABELS)


@pytest.mark.parametrize(
    ("labels", "line"),
    [
        ([], "two texts or more"),
        (["one"], "two texts or more"),
        (["a", "a"], "all different"),
        ("positive", "labels must be a list"),
        ([1, 2], "choices must be a list of non-empty texts"),
    ],
)
def test_labels_that_are_none_are_refused(engine, labels: object, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        pd.Series(["a"]).mlx.classify(labels)


def test_a_frame_needs_a_template_to_be_classified(engine) -> None:
    with pytest.raises(RequestError, match="a template is a text"):
        pd.DataFrame({"a": ["b"]}).mlx.classify(LABELS)


# -- extract ----------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}


async def test_fields_are_read_out_of_texts(adopt: Adopt) -> None:
    asked: list[str] = []
    adopt(
        lambda request: asked.append(question_of(request)) or json.dumps({"name": "Ada", "age": 36}).encode(),
        structured=True,
    )
    notes = pd.Series(["Ada is 36.", None])

    result = notes.mlx.extract(SCHEMA, progress=False)
    awaited = await notes.mlx.aextract(SCHEMA, into="who", progress=False)

    assert asked[0] == "Write what the text says as JSON (name, age).\n\nText: Ada is 36."
    assert result["name"].tolist() == ["Ada", pd.NA]
    assert result["age"].dtype == "Int64"
    assert awaited.columns.tolist() == ["text", "who.name", "who.age", "who_error"]
    with pytest.raises(RequestError, match="extract needs a schema"):
        notes.mlx.extract(None)


# -- score ------------------------------------------------------------------------------------------------------


def given(request) -> bytes:
    """Answer as the processors of the request would have it, were this a model."""
    return b"yes" if request.params.max_tokens == 3 else b"no"


def test_several_continuations_have_a_column_each(adopt: Adopt) -> None:
    adopt(given)
    frame = pd.DataFrame({"q": ["a", None, "b"]}, index=[7, 7, 8])

    result = frame.mlx.score("{{ q }}", ["yes", "no", "state"], progress=False)

    assert result.columns.tolist() == ["yes", "no", "state_", "best", "state", "error"]
    assert result["yes"].tolist() == [0, pd.NA, 0]
    assert result["best"].dtype == pd.CategoricalDtype(["yes", "no", "state"])
    assert result["state"].tolist() == ["done", "skipped", "done"]
    assert result["error"].tolist() == [pd.NA, "'q' is null", pd.NA]
    assert result.index.tolist() == [7, 7, 8]


async def test_a_rows_own_continuation_has_a_logprob_and_tokens(adopt: Adopt) -> None:
    adopt(given)
    frame = pd.DataFrame({"q": ["a"] * 4, "answer": pd.Series(["yes", None, "no", 3], dtype=object)})

    result = await frame.mlx.ascore("{{ q }}", mlx_nb.col("answer"), progress=False)

    assert result.columns.tolist() == ["logprob", "tokens", "state", "error"]
    assert result["tokens"].tolist() == [3, pd.NA, 2, pd.NA]
    assert result["state"].tolist() == ["done", "skipped", "done", "failed"]
    assert result["error"].tolist()[1::2] == ["'answer' is null", "a continuation is a text, got 3"]


def test_an_empty_frame_is_scored(adopt: Adopt) -> None:
    adopt(given)

    result = pd.DataFrame({"q": []}).mlx.score("{{ q }}", ["a", "b"], progress=False)

    assert (len(result), str(result["a"].dtype)) == (0, "Float64")


@pytest.mark.parametrize(
    ("continuations", "options", "line"),
    [
        ([], {}, "continuations are texts"),
        (["a", ""], {}, "continuations are texts"),
        ("yes", {}, "continuations must be a list"),
        (["a", "a"], {}, "must all be different"),
        (mlx_nb.col("nope"), {}, "no column 'nope'"),
        (["a", "b"], {"per": "word"}, "per must be one of 'text', 'token'"),
        (["a", "b"], {"max_tokens": 3}, "score takes no max_tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(engine, continuations, options: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        pd.DataFrame({"q": ["a"]}).mlx.score("{{ q }}", continuations, **options)


def log_likelihood(model, prompt: list[int], answer: list[int]) -> float:
    """Return what mlx-lm's model makes of an answer, in one pass."""
    mx = pytest.importorskip("mlx.core")
    logits = model(mx.array([prompt + answer]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return sum(logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(answer))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_scores_are_the_log_likelihoods_of_the_model_itself(session) -> None:
    from mlx_nb.backends import loader, sources
    from mlx_nb.prompts.chat import chat_tokens, messages_for

    core = session.start("demo").core
    core.wait_ready()
    frame = pd.DataFrame(
        {"city": ["Paris", "Tokyo"], "country": ["France", "Japan"]},
    )
    template = "In which country is {{ city }}?"

    both = frame.mlx.score(template, ["France", "Japan, of course"], progress=False)
    own = frame.mlx.score(template, mlx_nb.col("country"), per="token", progress=False)
    raw = frame.mlx.score("{{ city }} is in", [" France", " Japan"], raw=True, progress=False)

    assert both["best"].tolist() == ["France", "France"]  # the longer text is the less likely
    assert raw["best"].tolist() == [" France", " Japan"]
    model = loader.load(sources.fetch(sources.resolve("demo"))).model
    for i, city in enumerate(frame["city"]):
        prompt = chat_tokens(core.codec, messages_for(f"In which country is {city}?"))
        for text in ("France", "Japan, of course"):
            answer = core.codec.encode(text)
            assert math.isclose(both[text][i], log_likelihood(model, prompt, answer), abs_tol=2e-3)
        answer = core.codec.encode(frame["country"][i])
        mean = log_likelihood(model, prompt, answer) / len(answer)
        assert math.isclose(own["logprob"][i], mean, abs_tol=2e-3)
        assert own["tokens"][i] == len(answer)
        prompt, whole = core.codec.encode(f"{city} is in"), core.codec.encode(f"{city} is in France")
        assert math.isclose(
            raw[" France"][i], log_likelihood(model, prompt, whole[len(prompt) :]), abs_tol=2e-3
        )


# -- preview ----------------------------------------------------------------------------------------------------


def test_a_preview_shows_prompts_and_asks_nothing(adopt: Adopt) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"x", context_length=60)
    frame = pd.DataFrame(
        {"text": ["a", None, "b" * 99, "c", "d"], "most": [1, 1, 1, 3, 1]}, index=list("vwxyz")
    )

    preview = frame.mlx.preview("<{{ text }}>", rows=4, max_tokens=mlx_nb.col("most"))

    assert asked == []
    assert isinstance(preview, Preview)
    shown = preview.frame
    assert shown["prompt"].tolist() == ["user: <a>\nassistant: ", pd.NA, pd.NA, "user: <c>\nassistant: "]
    assert shown["prompt_tokens"].tolist() == [21, pd.NA, pd.NA, 21]
    assert shown["max_tokens"].tolist() == [1, pd.NA, pd.NA, 3]
    assert shown["state"].tolist() == ["ready", "skipped", "failed", "ready"]
    assert shown["error"].iloc[1] == "'text' is null"
    assert "context ends at 60" in shown["error"].iloc[2]
    assert shown.index.tolist() == list("vwxy")
    # Two of the four rows shown are ready, so that two and a half of all five would be.
    assert (preview.answers, preview.prompt_tokens, preview.new_tokens) == (5, 52, 5)


def test_the_time_is_unknown_until_the_engine_has_run(adopt: Adopt) -> None:
    adopt(step_s=0.01)
    words = pd.Series(["a"] * 100)

    before = words.mlx.preview(max_tokens=10)
    words.head(8).mlx.generate(max_tokens=10, progress=False)
    after = words.mlx.preview(n=3, temperature=1, max_tokens=10)

    assert before.seconds is None
    assert "the time is unknown until the engine has run" in str(before)
    assert (after.answers, after.new_tokens) == (300, 3000)
    assert 0 < after.seconds < 3000 * 0.1 + 300
    assert "at the speed so far" in str(after)


def test_a_preview_is_shown_as_a_table_and_a_line(engine) -> None:
    preview = pd.Series(["<b>"]).mlx.preview()

    html = preview._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<table" in html
    assert "1 answers, about 21 prompt tokens, at most 256 new tokens" in html


def test_a_preview_of_nothing(engine) -> None:
    preview = pd.DataFrame({"text": []}).mlx.preview("{{ text }}")

    assert (len(preview.frame), preview.answers, preview.prompt_tokens) == (0, 0, 0)


@pytest.mark.parametrize(
    ("options", "line"),
    [({"rows": 0}, "rows must be at least 1"), ({"template": "{{ nope }}"}, "no column 'nope'")],
)
def test_a_preview_refuses_what_a_call_would(engine, options: dict, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        pd.DataFrame({"text": ["a"]}).mlx.preview(**options)
