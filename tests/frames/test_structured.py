"""Schemas and choices over a DataFrame: typed columns, values, and answers that don't fit."""

import enum
import json
from typing import Literal

import pandas as pd
import pytest
from pydantic import BaseModel, Field, field_validator

import mlx_nb
from mlx_nb import RequestError

from .conftest import Adopt, prompt_of, repeat


class Mood(enum.Enum):
    """A mood."""

    GOOD = "good"
    BAD = "bad"
    NONE = "none at all"


class Home(BaseModel):
    """A home."""

    city: str
    floor: int | None = None


class Person(BaseModel):
    """Someone, with a field of every kind."""

    name: str
    age: int
    height: float
    member: bool
    size: Literal["S", "M", "L"]
    mood: Mood
    stars: Literal[1, 2, 3]
    tags: list[str]
    scores: dict[str, int]
    home: Home
    work: Home | None = None
    nickname: str | None = None
    weight: float | None = None
    either: int | str
    number: int | float
    friends: list["Person"] = Field(default_factory=list)

    @field_validator("age")
    @classmethod
    def plausible(cls, age: int) -> int:
        if age > 150:
            raise ValueError("nobody is that old")
        return age


ADA = {
    "name": "Ada",
    "age": 36,
    "height": 1.65,
    "member": True,
    "size": "M",
    "mood": "good",
    "stars": 3,
    "tags": ["x", "y"],
    "scores": {"a": 1},
    "home": {"city": "London", "floor": 2},
    "work": None,
    "nickname": None,
    "weight": 60,
    "either": "z",
    "number": 1.5,
    "friends": [],
}

COLUMNS = {
    "name": "string",
    "age": "Int64",
    "height": "Float64",
    "member": "boolean",
    "size": pd.CategoricalDtype(["S", "M", "L"]),
    "mood": pd.CategoricalDtype(["good", "bad", "none at all"]),
    "stars": pd.CategoricalDtype([1, 2, 3]),
    "tags": "object",
    "scores": "object",
    "home.city": "string",
    "home.floor": "Int64",
    "work.city": "string",
    "work.floor": "Int64",
    "nickname": "string",
    "weight": "Float64",
    "either": "object",
    "number": "Float64",
    "friends": "object",
}


@pytest.fixture
def parrot(adopt: Adopt) -> None:
    """Start an engine that answers with the question, whatever is asked of it."""
    adopt(repeat, structured=True)


def answers(*texts: object, **options) -> pd.DataFrame:
    """Return what becomes of these answers; one that isn't text is written as JSON."""
    said = [text if isinstance(text, str) else json.dumps(text) for text in texts]
    options = {"progress": False, "max_tokens": 1000} | options
    return pd.DataFrame({"said": said}).mlx.generate("{{ said }}", **options)


def fields(result: pd.DataFrame) -> dict[str, object]:
    """Return the dtypes of the columns between the text and the state."""
    return dict(result.loc[:, "text":"state"].dtypes.iloc[1:-1])


@pytest.mark.parametrize(
    "schema", [Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())]
)
def test_the_fields_of_a_schema_are_typed_columns(parrot, schema) -> None:
    result = answers(ADA, "null", schema=schema).iloc[:1]

    assert fields(result) == COLUMNS
    row = result.iloc[0]
    assert (row["name"], row["age"], row["height"], row["member"]) == ("Ada", 36, 1.65, True)
    assert (row["size"], row["mood"], row["stars"]) == ("M", "good", 3)
    assert (row["tags"], row["scores"], row["friends"]) == (["x", "y"], {"a": 1}, [])
    assert (row["home.city"], row["home.floor"], row["weight"]) == ("London", 2, 60.0)
    assert (row["either"], row["number"], row["state"]) == ("z", 1.5, "done")
    assert result[["work.city", "work.floor", "nickname"]].isna().all(axis=None)


def test_an_empty_frame_has_the_same_columns(parrot) -> None:
    result = answers(schema=Person)

    assert len(result) == 0
    assert fields(result) == COLUMNS


@pytest.mark.parametrize(
    ("schema", "dtype"),
    [
        ({"type": "integer"}, "Int64"),
        ({"type": ["integer", "null"]}, "Int64"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "boolean"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "Float64"),
        ({"allOf": [{"$ref": "#/$defs/word"}]}, "string"),
        ({"$ref": "#/$defs/word", "default": "a"}, "string"),
        ({"$ref": "#/$defs/nowhere"}, "object"),
        ({"type": "string", "format": "date-time"}, "string"),
        ({"enum": ["b", "a", None]}, pd.CategoricalDtype(["b", "a"])),
        ({"const": "only"}, pd.CategoricalDtype(["only"])),
        ({"enum": [True, False]}, "boolean"),
        ({"enum": [1, True]}, "object"),
        ({"enum": [["a"], "b"]}, "object"),
        ({"type": "array", "items": {"type": "string"}}, "object"),
        ({"type": "object"}, "object"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "object"),
        ({}, "object"),
        (True, "object"),
    ],
    ids=repr,
)
def test_what_a_field_may_be_decides_its_dtype(parrot, schema, dtype) -> None:
    whole = {
        "type": "object",
        "properties": {"field": schema},
        "$defs": {"word": {"type": "string"}},
    }

    assert fields(answers(schema=whole)) == {"field": dtype}


def test_a_schema_that_contains_itself_ends_in_an_object(parrot) -> None:
    class Node(BaseModel):
        label: str
        next: "Node | None" = None

    result = answers({"label": "a", "next": {"label": "b", "next": None}}, schema=Node)

    assert fields(result) == {"label": "string", "next": "object"}
    assert result["state"].tolist() == ["done"]


def test_an_answer_that_is_no_object_is_one_column(parrot) -> None:
    result = answers(["a", "b"], [], schema={"type": "array", "items": {"type": "string"}})

    assert fields(result) == {"value": "object"}
    assert result["value"].tolist() == [["a", "b"], []]
    assert fields(answers("3", schema={"type": "integer"})) == {"value": "Int64"}


def test_a_field_called_like_one_of_our_columns_has_an_underscore(parrot) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("text", "state", "state_", "error", "sample")},
    }

    result = answers(
        {"state": "Ohio", "text": "t", "state_": "s", "error": "e", "sample": "x"}, schema=schema
    )

    assert list(fields(result)) == ["text_", "state_", "state__", "error_", "sample_"]
    assert (result["state_"][0], result["state"][0], result["text_"][0]) == ("Ohio", "done", "t")


def test_values_that_do_not_fit_fail_their_row_alone(parrot) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}, "yes": {"type": "boolean"}},
    }

    result = answers(
        {"n": 1, "kind": "a", "yes": True},
        {"n": "one"},
        {"n": 2**63},
        {"kind": "c"},
        {"yes": 1},
        {"n": True},
        {"n": 2.0},
        {},
        schema=schema,
    )

    assert result["state"].tolist() == ["done", *["failed"] * 5, "done", "done"]
    assert result["n"].tolist() == [1, *[pd.NA] * 5, 2, pd.NA]
    assert result["error"].tolist()[1:6] == [
        "n must be a whole number, got 'one'",
        f"n must be {-(2**63)} to {2**63 - 1}, got {2**63}",
        "kind must be one of ['a', 'b'], got 'c'",
        "yes must be true or false, got 1",
        "n must be a whole number, got True",
    ]
    assert result["text"][1] == '{"n": "one"}'


def test_what_a_models_own_checks_refuse_fails_its_row(parrot) -> None:
    result = answers(ADA, ADA | {"age": 200}, schema=Person)

    assert result["state"].tolist() == ["done", "failed"]
    assert result["age"].tolist() == [36, pd.NA]
    assert result["error"][1] == "age: Value error, nobody is that old"


def test_json_that_is_cut_off_is_truncated(parrot) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}

    short = answers('{"n": 12345}', '{"n":1}', schema=schema, max_tokens=7)
    stopped = answers('{"n": 1, "m": 2}', schema=schema, stop=",")

    assert short["state"].tolist() == ["truncated", "done"]
    assert short["text"].tolist() == ['{"n": 1', '{"n":1}']
    assert short["n"].tolist() == [pd.NA, 1]
    assert short["finish_reason"].tolist() == ["length", "stop"]
    assert short["error"].tolist() == ["the JSON is cut off at max_tokens", pd.NA]
    assert stopped["state"].tolist() == ["truncated"]
    assert stopped["error"].tolist() == ["the JSON is cut off where it ended"]


def test_parsed_gives_instances_where_a_class_was_given(parrot) -> None:
    of_class = answers(ADA, "{", schema=Person, parsed=True)["parsed"]
    of_dict = answers(ADA, "{", schema=Person.model_json_schema(), parsed=True)["parsed"]

    assert of_class.tolist() == [Person(**ADA), None]
    assert of_dict.tolist() == [ADA, None]


def test_a_schema_may_differ_from_row_to_row(adopt: Adopt) -> None:
    adopt(repeat, structured=True)
    frame = pd.DataFrame(
        {
            "said": ['{"a": 1}', "[2]", "free", '{"a"'],
            "schema": [{"type": "object"}, '{"type": "array"}', None, {"type": "object"}],
        }
    )

    result = frame.mlx.generate("{{ said }}", schema=mlx_nb.col("schema"), progress=False)

    assert result["state"].tolist() == ["done", "done", "done", "truncated"]
    assert result["parsed"].tolist() == [{"a": 1}, [2], None, None]


def test_structure_that_cannot_be_is_refused_before_anything_runs(adopt: Adopt) -> None:
    asked: list[str] = []
    adopt(lambda request: asked.append(prompt_of(request)) or b"x")

    for options, message in [
        ({"schema": {}}, "schema is not supported by the fake backend"),
        ({"schema": "{"}, "schema is not JSON"),
        ({"choices": []}, "choices must be a list"),
        ({"schema": {}, "choices": ["a"]}, "exclude each other"),
        ({"schema": mlx_nb.col("text"), "choices": ["a"]}, "exclude each other"),
        ({"parsed": True}, "parsed is of a schema"),
    ]:
        with pytest.raises(ValueError, match=message):
            pd.Series(["a"], name="text").mlx.generate(progress=False, **options)
    assert asked == []


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_fills_in_a_schema(session) -> None:
    class City(BaseModel):
        continent: Literal["Africa", "Asia", "Europe"]
        coastal: bool

    session.start("demo")

    result = pd.Series(["Tokyo", "Paris", None], name="city").mlx.generate(
        "Describe {{ city }} as JSON.", schema=City, max_tokens=60, progress=False
    )
    with pytest.raises(RequestError, match="regex can't be used"):
        pd.Series(["a"]).mlx.generate(regex="(", progress=False)

    assert result["state"].tolist() == ["done", "done", "skipped"]
    assert result["continent"].dtype == pd.CategoricalDtype(["Africa", "Asia", "Europe"])
    assert result["continent"].notna().tolist() == [True, True, False]
    assert result["coastal"].dtype == "boolean"
