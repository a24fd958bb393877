"""Messages to tokens. The only caller of ``apply_chat_template``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..codec import Codec
from ..errors import RequestError

__all__ = ["Message", "chat_tokens", "messages_for", "shared_tokens"]

Message = Mapping[str, Any]
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

    A model without a chat template gets the messages' texts, a blank line between them.

    Raises
    ------
    RequestError
        When the template refuses the messages, or tools or thinking are asked of a model that can't do it.
    """
    tokenizer = codec.chat_tokenizer
    if not getattr(tokenizer, "has_chat_template", False):
        if tools or thinking is not None:
            raise RequestError("this model has no chat template: leave tools and thinking out")
        return codec.encode("\n\n".join(str(message["content"]) for message in messages))
    if tools and not getattr(tokenizer, "has_tool_calling", False):
        raise RequestError("this model can't call tools: leave tools out, or start one that can")
    if thinking and not getattr(tokenizer, "has_thinking", False):
        raise RequestError("this model doesn't think before it answers: leave thinking out")
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = list(tools)
    if thinking is not None:
        options["enable_thinking"] = thinking
    try:
        tokens = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, **options
        )
    except Exception as error:
        raise RequestError(f"the model's chat template refuses these messages: {_line(error)}") from error
    return [int(token) for token in tokens]


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
