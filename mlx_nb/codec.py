"""Text to token ids and back, as the rest of the package sees a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from .request import Media
from .sampling import SamplingParams

__all__ = ["Codec", "Detokenizer", "Piece", "Splitter"]

Piece = tuple[Literal["answer", "reasoning", "tool"], str]
"""Text and what it is part of."""


class Detokenizer(Protocol):
    """Tokens of one answer to text, as they come; text once given never changes."""

    def add(self, *token_ids: int) -> str:
        """Text that these tokens complete; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Text still held back; incomplete bytes become U+FFFD."""
        ...


class Splitter(Protocol):
    """Tells answer, reasoning and tool calls apart by the model's markers, which it takes out.

    The pieces do not depend on how the text was cut. A change of kind ends a piece, an empty one included.
    """

    def push(self, text: str) -> list[Piece]:
        """Pieces of which it is clear what they are."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back because a marker might have begun there."""
        ...


class Codec(Protocol):
    """Text to token ids and back. Thread-safe; no arrays."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def chat_tokenizer(self) -> Any:
        """Has ``apply_chat_template``; only ``prompts.chat`` calls it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids, with exactly one BOS where the tokenizer defines one."""
        ...

    @property
    def image_place(self) -> str:
        """What a prompt's text has for one picture; empty for models that take none."""
        ...

    @property
    def video_place(self) -> str:
        """What a prompt's text has for one video; empty for models that take none."""
        ...

    def image_places(self, text: str) -> int:
        """How many pictures a prompt has places for."""
        ...

    def read_media(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> Media:
        """A prompt with pictures, for models whose `ModelInfo.takes_images`; RequestError if they don't fit it."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        ...

    def splitter(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Splitter:
        """A fresh one for one answer; a prompt that opens the thinking itself is taken into account.

        Structured output has no markers but those of one thinking block before it.
        """
        ...

    def tool_calls(self, text: str, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The calls in what stood between a tool call's markers, ``{"name": …, "arguments": …}`` each.

        Raises whatever the model's parser raises for text that is no call.
        """
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one answer."""
        ...
