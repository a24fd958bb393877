"""Text to token ids and back, as the rest of the package sees a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["Codec", "Detokenizer"]


class Detokenizer(Protocol):
    """Tokens of one answer to text, a token at a time; text once given never changes."""

    def add(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Text still held back; incomplete bytes become U+FFFD."""
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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one answer."""
        ...
