"""Messages to tokens. The only caller of ``apply_chat_template``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..codec import Codec
from ..errors import RequestError

__all__ = ["Message", "chat_tokens", "messages_for", "shared_tokens"]

Message = Mapping[str, Any]
_KINDS = ("text", "image", "video")
_OTHER = "\x1a"
"""Begins no real message."""


def messages_for(prompt: str, system: str | None = None) -> list[Message]:
    """A question as messages."""
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": prompt}]


def chat_tokens(
    codec: Codec,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn.

    A model without a chat template gets the messages' texts, a blank line between them. Contents may be lists of
    parts, ``{"type": "text", "text": …}`` and ``{"type": "image"}``: each image becomes one place in the prompt.

    Raises
    ------
    RequestError
        When the template refuses the messages, or tools, thinking or images are asked of a model that can't do it.
    """
    for part in itertools.chain.from_iterable(map(_parts, messages)):
        if (kind := part.get("type")) not in _KINDS:
            raise RequestError(f"a message has a part of type {kind!r}: parts are {', '.join(_KINDS)}")
    images = sum(part.get("type") == "image" for message in messages for part in _parts(message))
    if images and not codec.image_place:
        raise RequestError("this model takes no images: leave them out, or start one that does")
    if not getattr(codec.chat_tokenizer, "has_chat_template", False):
        if tools or thinking is not None:
            raise RequestError("this model has no chat template: leave tools and thinking out")
        return codec.encode("\n\n".join(_plain(codec, message)["content"] for message in messages))
    options = _options(codec.chat_tokenizer, tools, thinking)
    if not any(map(_parts, messages)):
        return _templated(codec, messages, options)
    # Some templates take parts, some know of texts alone, and a few leave out what they don't know.
    with contextlib.suppress(RequestError):
        tokens = _templated(codec, messages, options)
        if codec.image_places(codec.decode(tokens)) >= images:  # more where a text says it too
            return tokens
    tokens = _templated(codec, [_plain(codec, message) for message in messages], options)
    if codec.image_places(codec.decode(tokens)) < images:
        raise RequestError("the model's chat template leaves images out: write the prompt yourself")
    return tokens


def _options(
    tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None, thinking: bool | None
) -> dict[str, Any]:
    """What the template is told, if the model can do it."""
    if tools and not getattr(tokenizer, "has_tool_calling", False):
        raise RequestError("this model can't call tools: leave tools out, or start one that can")
    if thinking and not getattr(tokenizer, "has_thinking", False):
        raise RequestError("this model doesn't think before it answers: leave thinking out")
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = list(tools)
    if thinking is not None:
        options["enable_thinking"] = thinking
    return options


def _templated(codec: Codec, messages: Sequence[Message], options: Mapping[str, Any]) -> list[int]:
    try:
        tokens = codec.chat_tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, **options
        )
    except Exception as error:
        raise RequestError(f"the model's chat template refuses these messages: {_line(error)}") from error
    return [int(token) for token in tokens]


def _parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _plain(codec: Codec, message: Message) -> Message:
    """The message with a text for its parts."""
    if not (parts := _parts(message)):
        return {**message, "content": str(message.get("content") or "")}
    places = {"image": codec.image_place, "video": codec.video_place}
    texts = (places.get(part.get("type", "")) or str(part.get("text", "")) for part in parts)
    return {**message, "content": "".join(texts)}


def shared_tokens(codec: Codec, messages: Sequence[Message], tokens: Sequence[int], **options: Any) -> int:
    """How many of a conversation's `tokens` stay the same when its last message is another one.

    That is what a later request is likely to share: the system prompt, or all earlier turns.
    """
    if not messages or not isinstance(messages[-1].get("content"), str):
        return 0
    other = {**messages[-1], "content": f"{_OTHER}{messages[-1]['content']}"}
    try:
        changed = chat_tokens(codec, [*messages[:-1], other], **options)
    except RequestError:  # the template looks into its messages: then nothing is known
        return 0
    pairs = enumerate(zip(tokens, changed, strict=False))
    return next((i for i, (one, two) in pairs if one != two), min(len(tokens), len(changed)))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
