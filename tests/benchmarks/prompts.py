"""Prompts of an exact length in tokens, whose text has just these tokens again; every number gives another one."""

import random
from pathlib import Path
from typing import Any

from .work import Prompt

TEXT = """\
the a of to and in on at with under over behind before after light house ship river bridge winter summer garden window
letter morning evening music colour number answer question history science weather village mountain bread apple silver
copper wooden quiet bright heavy early slow green small large old new first last"""
WORDS = TEXT.split()


class Writer:
    """Writes for the tokenizer of a subject."""

    def __init__(self, folder: Path) -> None:
        from mlx_lm.tokenizer_utils import load

        self._tokenizer: Any = load(folder)

    def write(self, kind: str, count: int, tokens: int, seed: int, shared: int = 0) -> list[Prompt]:
        """Return `count` prompts.

        Parameters
        ----------
        kind : {"apart", "chat", "shared"}
            Nothing in common; the header of a chat, in which the words are a question; the first `shared` tokens.
        tokens : int
            Of each; of the question alone in a chat.
        """
        if kind == "chat":
            return [self._chat(f"{seed}.{number}", tokens) for number in range(count)]
        head = self._exact(f"{seed}", shared).text if kind == "shared" else ""
        return [self._exact(f"{seed}.{number}", tokens, head) for number in range(count)]

    def _words(self, seed: str, count: int) -> str:
        return " ".join(random.Random(seed).choices(WORDS, k=count))

    def _chat(self, seed: str, tokens: int) -> Prompt:
        message = {"role": "user", "content": self._exact(seed, tokens).text}
        text = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return Prompt(text, self._encode(text))

    def _exact(self, seed: str, tokens: int, head: str = "") -> Prompt:
        for attempt in range(1000):
            text = head + " " + self._words(f"{seed}.{attempt}", tokens)
            cut = self._encode(text)[:tokens]
            text = self._tokenizer.decode(cut)
            if len(cut) == tokens and self._encode(text) == cut:
                return Prompt(text, cut)
        raise ValueError(f"no text of {tokens} tokens was found: choose another number")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
