"""``{{ name }}`` in prompts."""

import pytest

from mlx_nb import TemplateError
from mlx_nb.prompts.template import Template


@pytest.mark.parametrize(
    "text",
    [
        "{a} }} {a",
        '{"a": {"b": 1}}',
        "{k: v for k in x}",
        "{% if x %} {# comment #} {%- raw %}",
        "line\n\nline\n",
        "",
    ],
)
def test_all_but_double_braces_is_literal(text: str) -> None:
    template = Template(text)
    template.require([])

    assert template.names == frozenset()
    assert template.render({}) == text


def test_names_are_filled_in_and_what_they_hold_is_not_expanded_again() -> None:
    template = Template("{{ a }} {a} {{ b.upper() }} {{ len(a) }} {% x %}\n")

    assert template.names == {"a", "b", "len"}
    template.require(["a", "b"])
    assert template.render({"a": "{{ b }}", "b": "x"}) == "{{ b }} {a} X 7 {% x %}\n"


def test_nothing_is_escaped() -> None:
    assert Template("{{ a }}").render({"a": "<b> & 'c'"}) == "<b> & 'c'"


def test_blocks_work_where_they_are_asked_for() -> None:
    template = Template("{% for x in xs %}{{ x }},{% endfor %}", blocks=True)

    assert template.names == {"xs"}
    assert template.render({"xs": [1, 2]}) == "1,2,"


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    with pytest.raises(
        TemplateError, match=r"uses \{\{ titel \}\}, .* no column 'titel'; did you mean 'title'\?$"
    ):
        Template("{{ titel }}").require(["title", "text"], kind="column")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ a", "line 1"),
        ("x\n{{ a b }}", "line 2"),
        ("{{ }}", "line 1"),
    ],
)
def test_what_does_not_parse_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        Template(text)


def test_what_an_expression_raises_comes_as_one_line() -> None:
    with pytest.raises(TemplateError, match="failed: ZeroDivisionError: division by zero"):
        Template("{{ 1 / a }}").render({"a": 0})
    with pytest.raises(TemplateError, match="UndefinedError"):
        Template("{{ a.b.c }}").render({"a": 0})


@pytest.mark.parametrize("name", ["self", "range", "dict", "namespace", "cycler", "joiner", "lipsum", "loop"])
def test_names_that_jinja_has_a_meaning_for_are_names_like_any_other(name: str) -> None:
    template = Template(f"{{{{ {name}.upper() }}}}")

    assert template.names == {name}
    assert template.render({name: "mine"}) == "MINE"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{{ row["my column"] }} {{ row.city }}', {"my column", "city"}),
        ("{{ row[0] }}{{ row['a', 1] | upper }}{{ row['a', 1].real }}", {0, ("a", 1)}),
        ("{{ other.x }}", set()),
        ("{{ row[other] }}", None),
        ("{{ row.items() }}", None),
        ("{% for value in row %}{{ value }}{% endfor %}", None),
    ],
)
def test_the_keys_by_which_a_template_looks_into_a_name(text: str, keys: set | None) -> None:
    assert Template(text, blocks=True).keys("row") == keys
