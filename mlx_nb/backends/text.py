"""Text to tokens and back, over the tokenizer that mlx-lm loads. Plain Python values; no arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TokenizerCodec", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"


class WindowDetokenizer:
    """Decodes a window of tokens again with each new one, and gives the text that this adds.

    Works with every tokenizer: the text of a token may depend on the ones before it (spaces, bytes of one
    character spread over tokens), never on those before the window. Text that ends in U+FFFD is held back until
    the character is complete, or until it is clear that it never will be.
    """

    __slots__ = ("_decode", "_given", "_ids", "_start")

    # Longer than the bytes of any character: a U+FFFD still there after as many tokens is in the text itself.
    LONGEST_CHARACTER = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # where the text not given yet begins; one settled stretch before it stays as context
        self._given = ""

    def add(self, token_id: int) -> str:
        """Text that this token completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._start < self.LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def finish(self) -> str:
        """Text still held back."""
        return self._advance(self._decode(self._ids)) if self._ids else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        self._ids = self._ids[self._start :]
        self._start = len(self._ids)
        self._given = self._decode(self._ids)
        return new


class TokenizerCodec:
    """A `Codec` over mlx-lm's TokenizerWrapper, or a bare Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        from mlx_lm.tokenizer_utils import TokenizerWrapper

        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        self.chat_tokenizer = tokenizer
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self.vocabulary_size = vocabulary_size
        # The Rust tokenizer is several times faster than the Python around it, and cleans nothing up.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = fast if hasattr(fast, "decode") else None

    def encode(self, text: str) -> list[int]:
        """Token ids, with one BOS where the tokenizer defines one and the text has none yet."""
        bos = self.chat_tokenizer.bos_token
        add = bos is None or not text.startswith(bos)
        return list(self.chat_tokenizer.encode(text, add_special_tokens=add))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=False))
        return str(
            self.chat_tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def detokenizer(self) -> WindowDetokenizer:
        """A fresh one for one answer."""
        return WindowDetokenizer(self.decode)
