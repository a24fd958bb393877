"""What a structured answer holds, when it ended by itself and when max_tokens ended it."""

import json

import pytest
from pydantic import BaseModel, field_validator

from mlx_nb import RequestOutput, SamplingParams
from mlx_nb.session.session import to_generation


class City(BaseModel):
    """A city that may not be called Atlantis."""

    name: str

    @field_validator("name")
    @classmethod
    def exists(cls, name: str) -> str:
        if name == "Atlantis":
            raise ValueError("no such city")
        return name


def read(text: str, finish_reason: str, **constraint):
    output = RequestOutput("r", output_text=text, finished=True, finish_reason=finish_reason)
    answer = to_generation(output, SamplingParams(**constraint))
    return answer.parsed, answer.finish_reason


@pytest.mark.parametrize(
    "text",
    ['{"name": "Oslo"}', "[1, 2]", '"a"', "true", "null"],
    ids=["object", "list", "text", "bool", "null"],
)
def test_json_that_is_complete_at_max_tokens_is_complete(text: str) -> None:
    assert read(text, "length", schema={}) == (json.loads(text), "stop")


@pytest.mark.parametrize("text", ['{"name": "Osl', "[1, 2", '"a', "12", "", '"a\\"'])
def test_json_that_max_tokens_cut_off_has_no_value(text: str) -> None:
    assert read(text, "length", schema={}) == (None, "length")


def test_a_number_is_complete_where_the_answer_ended_by_itself() -> None:
    assert read("12", "stop", schema={"type": "integer"}) == (12, "stop")


def test_an_instance_is_made_of_json_that_is_complete_at_max_tokens() -> None:
    assert read('{"name": "Oslo"}', "length", schema=City) == (City(name="Oslo"), "stop")


def test_what_the_models_own_checks_refuse_is_complete_and_has_no_value() -> None:
    assert read('{"name": "Atlantis"}', "stop", schema=City) == (None, "stop")


def test_a_choice_is_complete_unless_it_begins_another() -> None:
    choices = ["yes", "no", "no idea"]

    assert read("yes", "length", choices=choices) == ("yes", "stop")
    assert read("no idea", "length", choices=choices) == ("no idea", "stop")
    assert read("no", "length", choices=choices) == (None, "length")
    assert read("no", "stop", choices=choices) == ("no", "stop")
    assert read("ye", "length", choices=choices) == (None, "length")


def test_a_regex_may_go_on_at_max_tokens() -> None:
    assert read("aa", "length", regex="a+") == (None, "length")
    assert read("aa", "stop", regex="a+") == ("aa", "stop")


def test_an_aborted_answer_has_no_value() -> None:
    assert read('{"name": "Oslo"}', "abort", schema=City) == (None, "abort")


def test_an_answer_without_structure_keeps_its_reason() -> None:
    assert read("[1]", "length") == (None, "length")
