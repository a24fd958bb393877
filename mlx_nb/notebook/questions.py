"""A line's prompt may end in a question mark.

IPython takes every line that ends in ``?`` for a request for help, ``%mlx_generate What is the capital of
France?`` included. This transformer comes first and makes it the call that it would be without the mark.
"""

from __future__ import annotations

import tokenize
from collections.abc import Sequence

from IPython.core.inputtransformer2 import EscapedCommand, MagicAssign, TokenTransformBase

__all__ = ["PromptLine"]

_INDENTATION = (tokenize.INDENT, tokenize.DEDENT)


class PromptLine(TokenTransformBase):
    """``%mlx_generate …`` or ``name = %mlx_generate …``; ``%mlx_generate?`` alone still asks for help."""

    priority = 4  # before IPython's help, which has 5
    magic = "mlx_generate"

    def __init__(self, begin: tuple[int, int], magic_at: tuple[int, int]) -> None:
        super().__init__(begin)  # type: ignore[no-untyped-call, unused-ignore]
        self._rest = (EscapedCommand if magic_at == begin else MagicAssign)(magic_at)

    @classmethod
    def find(cls, tokens_by_line: Sequence[Sequence[tokenize.TokenInfo]]) -> PromptLine | None:
        """The first such line of a cell."""
        for line in tokens_by_line:
            tokens = [token for token in line if token.type not in _INDENTATION]
            words = [token.string for token in tokens]
            for at in (0, words.index("=") + 1 if "=" in words else 0):
                if words[at : at + 2] == ["%", cls.magic] and words[at + 2 : at + 3] != ["?"]:
                    return cls(tokens[0].start, tokens[at].start)
        return None

    def transform(self, lines: list[str]) -> list[str]:
        """Do what IPython does with a magic."""
        return list(self._rest.transform(lines))
