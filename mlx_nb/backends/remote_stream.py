"""A server's stream, chunk by chunk, to what the engine is told. Takes chunks as loosely as servers make them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from ..errors import RemoteError
from .base import Ended, Text
from .remote_errors import Cut

__all__ = ["read"]


async def read(stream: AsyncIterator[Any], request_id: str) -> AsyncIterator[Text | Ended]:
    """Texts, and the end as the last. Raises `Cut` if none comes."""
    calls, answers, thoughts = _Calls(), _Halves(), _Halves()
    reason: str | None = None
    usage: Any = None
    try:
        async for chunk in stream:
            usage = getattr(chunk, "usage", None) or usage
            for choice in getattr(chunk, "choices", None) or ():
                if getattr(choice, "index", None):
                    continue  # another answer, which nobody asked for
                text = _read(choice, request_id, calls)
                text = replace(
                    text, answer=answers.join(text.answer), reasoning=thoughts.join(text.reasoning)
                )
                if text.answer or text.reasoning:
                    yield text
                reason = getattr(choice, "finish_reason", None) or reason
    except Exception:
        if reason is None:  # else the answer is whole, whatever came after it
            raise
    if reason is None:
        raise Cut
    found, broken = calls.finish()
    if broken:
        yield Text(request_id, broken)
    yield _ended(request_id, reason, found, usage)


def _read(choice: Any, request_id: str, calls: _Calls) -> Text:
    """The text of a chunk; parts of calls are added to those there are."""
    delta = getattr(choice, "delta", None)
    if delta is None:  # a raw completion
        return Text(request_id, _text(getattr(choice, "text", None)), "", 1)
    calls.add(getattr(delta, "tool_calls", None) or ())
    return Text(request_id, _text(getattr(delta, "content", None)), _reasoning(delta), 1)


def _ended(request_id: str, reason: str, calls: list[dict[str, Any]], usage: Any) -> Ended:
    match reason:
        case "stop" | "tool_calls" | "function_call":
            kind = "stop"
        case "length":
            kind = "length"
        case _:
            raise RemoteError(f"the server ended the answer: {reason}")
    details = getattr(usage, "prompt_tokens_details", None)
    return Ended(
        request_id,
        "stop" if kind == "stop" else "length",
        calls,
        _count(usage, "prompt_tokens") or 0,
        _count(usage, "completion_tokens"),
        _count(details, "cached_tokens") or 0,
    )


def _count(counts: Any, name: str) -> int | None:
    value = getattr(counts, name, None)
    if value is None and isinstance(counts, Mapping):
        value = counts.get(name)
    return value if type(value) is int and 0 <= value < 2**53 else None


def _reasoning(delta: Any) -> str:
    """Servers call it one or the other."""
    return _text(getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None))


def _text(content: Any) -> str:
    """A string, of which some servers make a list of parts."""
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "".join(text for text in texts if isinstance(text, str))


class _Halves:
    """Joins characters that servers of UTF-16 cut in two; a half alone is none, and nobody could write it."""

    def __init__(self) -> None:
        self._half = ""

    def join(self, text: str) -> str:
        """The text, from the half that was left to the one that is left now."""
        if not self._half and text.isascii():
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Calls:
    """Tool calls, which come in pieces."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[str, str]] = {}

    def add(self, pieces: Any) -> None:
        """Take the pieces of a chunk."""
        for piece in pieces:
            function = getattr(piece, "function", None)
            index = getattr(piece, "index", None)
            index = index if isinstance(index, int) else len(self._parts)
            name, arguments = self._parts.get(index, ("", ""))
            said = getattr(function, "arguments", None) or ""
            said = said if isinstance(said, str) else json.dumps(said)
            self._parts[index] = (name or str(getattr(function, "name", None) or ""), arguments + said)

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """The calls, and as text what is none."""
        calls, broken = [], ""
        for _, (name, arguments) in sorted(self._parts.items()):
            try:
                read = json.loads(arguments or "{}")
            except ValueError:
                read = None
            if name and isinstance(read, dict):
                calls.append({"name": name, "arguments": read})
            elif name or arguments:
                broken += f"{name}({arguments})"
        return calls, broken
