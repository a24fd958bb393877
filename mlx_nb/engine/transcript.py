"""Tokens of one answer to its text, reasoning and tool calls, and where it ends.

This happens here, once, for every backend and every way to read an answer, so that streamed and whole are the
same. Stop strings apply to the answer, not to the reasoning.
"""

from __future__ import annotations

from typing import Any, Literal

from ..codec import Codec, Piece
from ..outputs import TokenLogprob
from ..request import Request
from .stops import StopFilter

__all__ = ["End", "Transcript"]

End = Literal["stop", "length"]


class Transcript:
    """Append-only. Written by the engine thread.

    Parameters
    ----------
    limit : int
        Tokens after which the answer ends with "length".
    """

    __slots__ = (
        "_codec", "_detokenizer", "_ends", "_request", "_splitter", "_stops", "_tool",
        "limit", "logprobs", "reasoning", "text", "tokens", "tool_calls",
    )  # fmt: skip

    def __init__(self, request: Request, codec: Codec, limit: int) -> None:
        params = request.params
        self.limit = limit
        self.tokens: list[int] = []
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._request = request
        self._codec = codec
        self._ends = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else codec.eos_token_ids
        )
        self._detokenizer = codec.detokenizer()
        self._splitter = codec.splitter(request.prompt_token_ids, params)
        self._stops = StopFilter(params.stop or ())
        self._tool: str | None = None

    def add(self, token_id: int, logprob: TokenLogprob | None) -> End | None:
        """Take the next token; why the answer ends here, if it does."""
        if token_id in self._ends:
            self._finish()
            return "stop"
        self.tokens.append(token_id)
        if self.logprobs is not None and logprob is not None:
            self.logprobs.append(logprob)
        if self._take(self._splitter.push(self._detokenizer.add(token_id))):
            return "stop"
        if len(self.tokens) >= self.limit:
            return "stop" if self._finish() else "length"
        return None

    def cut_off(self) -> None:
        """Nothing follows: let through what was held back."""
        self._finish()

    def _finish(self) -> bool:
        """Let through what was held back; True if that completes a stop string."""
        pieces = self._splitter.push(self._detokenizer.finish()) + self._splitter.finish()
        if self._take(pieces) or self._close_tool():
            return True
        self.text += self._stops.flush()
        return False

    def _take(self, pieces: list[Piece]) -> bool:
        for kind, piece in pieces:
            if kind == "tool":
                self._tool = (self._tool or "") + piece
                continue
            if self._close_tool():
                return True
            if kind == "reasoning":
                self.reasoning += piece
            elif self._answer(piece):
                return True
        return False

    def _answer(self, piece: str) -> bool:
        passed, stopped = self._stops.push(piece)
        self.text += passed
        return stopped

    def _close_tool(self) -> bool:
        """Read the tool call that ended; a block that is none stays in the text. True if that stops the answer."""
        block, self._tool = self._tool, None
        if block is None or not block.strip():
            return False
        try:
            self.tool_calls += self._codec.tool_calls(block, self._request.tools)
        except Exception:  # the model's parser, on what the model wrote: any error means that it is no call
            return self._answer(block)
        return False
