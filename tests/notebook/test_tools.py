"""Python functions as tools: their schemas, and calls with what a model wrote."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel

from mlx_nb.session.tools import Called, Tool, ToolError, Tools


class Unit(enum.Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@dataclass
class Place:
    city: str
    country: str = "FR"


class Person(BaseModel):
    name: str
    born: int


def numpy_style(city: str, days: int = 3) -> str:
    """Tell the weather.

    For some days.

    Parameters
    ----------
    city : str
        Where,
        in English.
    days : int, optional
        How long.

    Returns
    -------
    str
        The weather.
    """
    return f"{city} for {days}"


def google_style(city: str, days: int = 3) -> str:
    """Tell the weather.

    For some days.

    Args:
        city (str): Where,
            in English.
        days: How long.

    Returns:
        str: The weather.
    """
    return f"{city} for {days}"


def sphinx_style(city: str, days: int = 3) -> str:
    """Tell the weather.

    For some days.

    :param str city: Where,
        in English.
    :param days: How long.
    :returns: The weather.
    """
    return f"{city} for {days}"


@pytest.mark.parametrize("function", [numpy_style, google_style, sphinx_style])
def test_a_schema_comes_from_signature_and_docstring(function: Callable[..., Any]) -> None:
    assert Tool(function).schema == {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Tell the weather. For some days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, in English."},
                    "days": {"type": "integer", "default": 3, "description": "How long."},
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (str, {"type": "string"}),
        (bool, {"type": "boolean"}),
        (float, {"type": "number"}),
        (Any, {}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (tuple[str, ...], {"type": "array", "items": {"type": "string"}}),
        (
            tuple[int, str],
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (Unit, {"enum": ["C", "F"]}),
        (Annotated[int, "in days"], {"type": "integer", "description": "in days"}),
        (Person, Person.model_json_schema()),
        (
            Place,
            {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                "required": ["city"],
            },
        ),
    ],
)
def test_annotations_become_schemas(kind: Any, schema: dict[str, Any]) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = kind

    assert Tool(tool).schema["function"]["parameters"]["properties"]["value"] == schema


def test_arguments_without_annotation_may_be_anything() -> None:
    def tool(one, two=None): ...  # type: ignore[no-untyped-def]

    described = Tool(tool).schema["function"]

    assert described["description"] == ""
    assert described["parameters"] == {
        "type": "object",
        "properties": {"one": {}, "two": {}},
        "required": ["one"],
    }


@pytest.mark.parametrize(
    ("kind", "given", "taken"),
    [
        (str, "a", "a"),
        (int, 3, 3),
        (int, "3", 3),
        (int, 3.0, 3),
        (float, 3, 3.0),
        (float, "2.5", 2.5),
        (bool, "True", True),
        (int | str, "3", "3"),
        (int | None, None, None),
        (float | None, "null", None),
        (list[int], "[1, 2]", [1, 2]),
        (set[int], [1, 1, "2"], {1, 2}),
        (tuple[int, str], [1, "a"], (1, "a")),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (Literal["a", "b"], "b", "b"),
        (Unit, "F", Unit.FAHRENHEIT),
        (Annotated[int, "in days"], "3", 3),
        (Person, {"name": "Ada", "born": 1815}, Person(name="Ada", born=1815)),
        (Place, {"city": "Paris"}, Place("Paris")),
        (Any, [1, {"a": None}], [1, {"a": None}]),
    ],
)
def test_arguments_come_as_their_annotations_say(kind: Any, given: Any, taken: Any) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = kind

    bound = Tool(tool).bind({"value": given}).arguments["value"]

    assert bound == taken
    assert type(bound) is type(taken)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (int, "many", "a whole number, got 'many'"),
        (int, 2.5, "a whole number, got 2.5"),
        (int, True, "a whole number, got True"),
        (str, 3, "a text, got 3"),
        (bool, 1, "true or false, got 1"),
        (int | None, "x", "a whole number or null, got 'x'"),
        (list[int], 3, "a list, got 3"),
        (list[int], ["x"], "a whole number, got ['x']"),
        (tuple[int, str], [1], "a list of 2, got [1]"),
        (dict[str, int], "x", "an object, got 'x'"),
        (Literal["a", "b"], "c", "one of 'a', 'b', got 'c'"),
        (Unit, "K", "one of 'C', 'F', got 'K'"),
        (Place, {"town": "Paris"}, "a Place ("),
        (Person, {"name": "Ada"}, "a Person ("),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(kind: Any, given: Any, message: str) -> None:
    def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = kind

    with pytest.raises(ToolError) as caught:
        Tool(tool).bind({"value": given})

    assert str(caught.value).startswith(f"tool(value=…) takes {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "numpy_style needs 'city'"),
        ({"town": "Paris"}, "numpy_style takes no 'town'; it takes city, days"),
        ("{city", "the arguments are no JSON: "),
        ([1], "the arguments must be an object, got [1]"),
    ],
)
def test_calls_with_other_arguments_are_refused_in_one_line(arguments: Any, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        Tool(numpy_style).bind(arguments)

    assert str(caught.value).startswith(message)


def no_annotation_of_ours(value: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    ...


def takes_bytes(value: bytes) -> None: ...


def takes_any_number(*values: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "a tool needs a name: define <lambda> with def"),
        (no_annotation_of_ours, "an annotation of no_annotation_of_ours can't be read: "),
        (takes_bytes, "takes_bytes(value): a model can't write a bytes: take text or numbers, and convert"),
        (takes_any_number, "takes_any_number takes *values, which a model can't fill: name its arguments"),
    ],
)
def test_functions_that_can_not_be_described_are_refused(function: Any, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        Tool(function)

    assert str(caught.value).startswith(message)


def test_two_tools_may_not_share_a_name() -> None:
    with pytest.raises(ToolError, match="two tools are called numpy_style: rename one"):
        Tools([numpy_style, numpy_style])


def test_objects_and_methods_are_tools_as_well() -> None:
    class Weather:
        def ask(self, city: str) -> str:
            """Ask."""
            return city.upper()

        def __call__(self, city: str) -> str:
            """Call."""
            return city.lower()

    tools = Tools([Weather().ask, Weather(), Person])

    assert [schema["function"]["name"] for schema in tools.schemas] == ["ask", "Weather", "Person"]
    assert tools.run({"name": "ask", "arguments": {"city": "Paris"}}).content == "PARIS"
    assert tools.run({"name": "Weather", "arguments": {"city": "Paris"}}).content == "paris"
    person = tools.run({"name": "Person", "arguments": {"name": "Ada", "born": "1815"}})
    assert person.content == '{"name":"Ada","born":1815}'


def test_further_arguments_go_where_the_function_takes_them() -> None:
    def tool(first: int, /, second: int = 2, **rest: int) -> list[Any]:
        return [first, second, rest]

    called = Tools([tool]).run({"name": "tool", "arguments": '{"first": 1, "third": "3"}'})

    assert called.content == '[1, 2, {"third": 3}]'


def test_results_are_told_as_text_or_json() -> None:
    def tool(value: Any) -> Any:
        return {"text": "à la", "place": Place("Paris"), "set": {1}, "none": None}[value]

    tools = Tools([tool])

    told = {
        name: tools.run({"name": "tool", "arguments": {"value": name}}).content
        for name in ("text", "place", "set", "none")
    }

    assert told == {
        "text": "à la",
        "place": '{"city": "Paris", "country": "FR"}',
        "set": "{1}",
        "none": "null",
    }


def test_what_goes_wrong_is_told_to_the_model() -> None:
    def fails(value: int) -> float:
        return 1 / value

    tools = Tools([fails])

    zero = tools.run({"name": "fails", "arguments": {"value": 0}})
    text = tools.run({"name": "fails", "arguments": {"value": "x"}})
    other = tools.run({"name": "other", "arguments": {}})

    assert zero == Called("fails", {"value": 0}, "error: ZeroDivisionError: division by zero", failed=True)
    assert text.content == "error: fails(value=…) takes a whole number, got 'x'"
    assert other.content == "error: there is no tool 'other'; there are fails"
    assert str(zero) == "fails(value=0) → error: ZeroDivisionError: division by zero"


def test_an_interrupt_passes_through_a_tool() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tools([interrupted]).run({"name": "interrupted", "arguments": {}})


async def test_a_coroutine_function_is_awaited_here_or_on_a_loop_of_its_own() -> None:
    async def tool(value: int) -> int:
        if value < 0:
            raise ValueError("too small")
        return value + 1

    tools = Tools([tool])

    started = tools.start({"name": "tool", "arguments": {"value": 1}})
    assert not isinstance(started, Called)
    assert (await started).content == "2"
    assert tools.run({"name": "tool", "arguments": {"value": 2}}).content == "3"
    assert tools.run({"name": "tool", "arguments": {"value": -1}}).content == "error: ValueError: too small"
