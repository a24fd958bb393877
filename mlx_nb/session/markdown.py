"""A model's markdown, made safe to render.

A notebook renders the markdown of an output that a cell has just made with all the HTML in it, event handlers
included. So a model's tags and entities are escaped, and links to scripts are broken. Code must stay readable, and
where it begins is a matter of opinion among renderers: it is written anew in a form that all of them read alike, code
blocks from the first column on, code within a line that holds a tag as an element with every sign of it escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["code_block", "code_span", "safe_markdown"]

_NEWLINE = re.compile(r"\r\n?")
_OPENING = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$")
_LANGUAGE = re.compile(r"\s*([\w+#.-]*)")
_BACKTICKS = re.compile(r"`+")
_SPAN = re.compile(r"(?<!`)(?P<ticks>`+)(?!`)(?P<code>[^\n]+?)(?<!`)(?P=ticks)(?!`)")
_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|&(?=[A-Za-z#])")
_SCRIPT_LINK = re.compile(r"(\]\s*[(:]\s*)(?=(?:java|vb)script\\?:)", re.IGNORECASE)


def safe_markdown(text: str) -> str:
    """The same to read, and nothing in it that could run. A code block that isn't closed yet is closed."""
    if not any(sign in text for sign in "<&`~:"):
        return text
    parts: list[str] = []
    prose: list[str] = []
    lines = iter(_NEWLINE.sub("\n", text).split("\n"))
    for line in lines:
        opening = _OPENING.match(line)
        if opening is None:
            prose.append(line)
            continue
        parts += [_safe_prose("\n".join(prose))] if prose else []
        prose = []
        parts.append(_rewritten(opening, lines))
    parts += [_safe_prose("\n".join(prose))] if prose else []
    return "\n".join(parts)


def code_block(text: str, language: str = "") -> str:
    """A code block, with a fence that isn't in the text."""
    ticks = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    return f"{ticks}{language}\n{text}\n{ticks}"


def code_span(text: str) -> str:
    """Code within a line, valid as markdown and as HTML."""
    signs = (c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text.replace("\n", " "))
    return f"<code>{''.join(signs)}</code>"


def _rewritten(opening: re.Match[str], lines: Iterator[str]) -> str:
    """The code block that `opening` begins, taken from the lines that follow."""
    fence, indent = opening["fence"], len(opening["indent"])
    closing = re.compile(rf"[ \t]*{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
    code: list[str] = []
    for line in lines:
        if closing.match(line):
            break
        code.append(line[min(indent, len(line) - len(line.lstrip(" \t"))) :])
    language = _LANGUAGE.match(opening["info"])
    return code_block("\n".join(code), language[1] if language else "")


def _safe_prose(text: str) -> str:
    parts: list[str] = []
    end = 0
    for span in _SPAN.finditer(text):
        parts += [_escaped(text[end : span.start()]), _safe_span(span)]
        end = span.end()
    parts.append(_escaped(text[end:]))
    return _SCRIPT_LINK.sub(r"\1unsafe:", "".join(parts))


def _safe_span(span: re.Match[str]) -> str:
    code = span["code"]
    if not _MARKUP.search(code):
        return span[0]
    padded = code.startswith(" ") and code.endswith(" ") and code.strip()
    return code_span(code[1:-1] if padded else code)


def _escaped(text: str) -> str:
    return _MARKUP.sub(lambda found: "&lt;" if found[0] == "<" else "&amp;", text)
