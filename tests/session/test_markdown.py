"""A model's markdown, read by people and never run."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbconvert.filters.markdown_mistune import markdown2html_mistune

from mlx_nb.session.markdown import code_block, code_span, safe_markdown

HARMLESS = {
    *(
        "p",
        "em",
        "strong",
        "code",
        "pre",
        "ul",
        "ol",
        "li",
        "blockquote",
        "hr",
        "br",
        "a",
        "img",
        "del",
        "div",
    ),
    *(
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "span",
        "input",
        "section",
    ),
}


class Harm(HTMLParser):
    """Finds what a page may run."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in HARMLESS:
            self.found.append(tag)
        for name, value in attrs:
            scheme = "".join((value or "").split()).lower()
            if name.startswith("on") or scheme.startswith(("javascript:", "vbscript:")):
                self.found.append(f"{tag} {name}={value}")


@pytest.mark.parametrize(
    "text",
    [
        "It is **two**, 2 < 3 & more:\n\n- a\n- `b`\n",
        "```python\nif a < b and c<d:\n    pass\n```",
        "    a < b",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "$a < b$",
        "[a link](https://example.com/?a=1)",
    ],
)
def test_what_holds_no_tag_stays_as_it_is(text: str) -> None:
    assert safe_markdown(text) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a <b>b</b> &lt;", "a &lt;b>b&lt;/b> &amp;lt;"),
        ("`<div>` and `a | b`", "<code>&#60;div&#62;</code> and `a | b`"),
        ("`` `<b>` ``", "<code>&#96;&#60;b&#62;&#96;</code>"),
        ("```html\n<b>", "```html\n<b>\n```"),
        ("~~~\n<b> ```\n~~~\n<b>", "````\n<b> ```\n````\n&lt;b>"),
        ("1. Run\n   ```sh\n   a <b\n     c\n   ```\n2. So", "1. Run\n```sh\na <b\n  c\n```\n2. So"),
        ("```a\r\n<b>\r\n```\r\n<b>", "```a\n<b>\n```\n&lt;b>"),
        ("[x](javascript:a)", "[x](unsafe:javascript:a)"),
        ("[x]:\n JavaScript\\:a", "[x]:\n unsafe:JavaScript\\:a"),
        ("[x](java&#115;cript:a)", "[x](java&amp;#115;cript:a)"),
    ],
)
def test_tags_are_escaped_and_code_stays_readable(text: str, safe: str) -> None:
    assert safe_markdown(text) == safe


def test_blocks_and_spans_hold_any_code() -> None:
    assert code_block("a ```` b", "py") == "`````py\na ```` b\n`````"
    assert (
        code_span("a(b='<c>')\n`*`") == "<code>a&#40;b&#61;&#39;&#60;c&#62;&#39;&#41; &#96;&#42;&#96;</code>"
    )


FRAGMENTS = [
    *(
        "<script>a()</script>",
        "<img src=x onerror=a()>",
        "<svg/onload=a()>",
        "</code>",
        "</pre>",
        "<!--",
        "-->",
    ),
    *(
        "`",
        "``",
        "```",
        "~~~",
        "```html\n",
        "\n",
        "\n\n",
        "\r",
        "\r\n",
        "    ",
        "\t",
        "- ",
        "> ",
        "1. ",
        "a",
        "\\",
    ),
    *("[x](javascript:a())", "[y]: javascript:a()\n", "[y]", "<javascript:a()>", "[z](<javascript:a()>)"),
    *(
        "java&#115;cript:a()",
        "javascript&colon;a()",
        "&lt;",
        "&#60;",
        "](",
        "[",
        "]",
        "(",
        ")",
        "|",
        "|-|\n",
        "<",
        "$",
    ),
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_no_text_becomes_something_that_runs(text: str) -> None:
    assert Harm(markdown2html_mistune(safe_markdown(text))).found == []
