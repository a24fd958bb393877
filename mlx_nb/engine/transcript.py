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
from .token_texts import TokenTexts

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
        "_codec", "_detokenizer", "_ends", "_request", "_splitter", "_stops", "_texts", "_tool",
        "limit", "reasoning", "text", "tokens", "tool_calls",
    )  # fmt: skip

    def __init__(self, request: Request, codec: Codec, limit: int) -> None:
        params = request.params
        self.limit = limit
        self.tokens: list[int] = []
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self._request = request
        self._codec = codec
        self._ends = frozenset(params.stop_token_ids or ()) | (
            frozenset() if params.ignore_eos else codec.eos_token_ids
        )
        self._detokenizer = codec.detokenizer()
        self._splitter = codec.splitter(request.prompt_token_ids, params)
        self._stops = StopFilter(params.stop or ())
        self._tool: str | None = None
        self._texts: TokenTexts | None = None
        if params.logprobs is not None:
            self._texts = TokenTexts(codec, next(reversed(request.prompt_token_ids), None))

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One a token, if they were asked for; a text is filled in once it is decided what it belongs to."""
        return None if self._texts is None else self._texts.logprobs

    def add(self, token_id: int, logprob: TokenLogprob | None) -> End | None:
        """Take the next token; why the answer ends here, if it does."""
        if token_id in self._ends:
            self._finish()
            return "stop"
        self.tokens.append(token_id)
        if self._texts is not None and logprob is not None:
            self._texts.add(logprob)
        if self._push(self._detokenizer.add(token_id)):
            self._end()
            return "stop"
        if len(self.tokens) >= self.limit:
            return "stop" if self._finish() else "length"
        return None

    def cut_off(self) -> None:
        """Nothing follows: let through what was held back."""
        self._finish()

    def _finish(self) -> bool:
        """Let through what was held back; True if that completes a stop string."""
        stopped = (
            self._push(self._detokenizer.finish())
            or self._take(self._splitter.finish())
            or self._close_tool()
        )
        if not stopped:
            self._let_through(self._stops.flush())
        self._end()
        return stopped

    def _end(self) -> None:
        if self._texts is not None:
            self._texts.end()

    def _push(self, text: str) -> bool:
        """Take text as it is decoded; True if that completes a stop string."""
        if self._texts is None:
            return self._take(self._splitter.push(text))
        self._texts.wrote(text)
        for character in text:
            self._texts.read(character)
            pieces = self._splitter.push(character)
            if self._take(pieces):
                return True
            if len(pieces) > 1:  # a change of kind: the character completes a marker
                self._texts.marked()
        return False

    def _take(self, pieces: list[Piece]) -> bool:
        for kind, piece in pieces:
            if kind == "tool":
                self._tool = (self._tool or "") + piece
                if self._texts is not None:
                    self._texts.called(len(piece))
                continue
            if self._close_tool():
                return True
            if kind == "reasoning":
                self.reasoning += piece
                if self._texts is not None:
                    self._texts.reasoned(len(piece))
                continue
            if self._texts is not None:
                self._texts.answered(len(piece))
            if self._answer(piece):
                return True
        return False

    def _answer(self, piece: str) -> bool:
        passed, stopped = self._stops.push(piece)
        self._let_through(passed)
        return stopped

    def _let_through(self, text: str) -> None:
        self.text += text
        if self._texts is not None:
            self._texts.passed(len(text))

    def _close_tool(self) -> bool:
        """Read the tool call that ended; a block that is none stays in the text. True if that stops the answer."""
        block, self._tool = self._tool, None
        if block is None:
            return False
        calls: list[dict[str, Any]] | None = []
        if block.strip():
            try:
                calls = self._codec.tool_calls(block, self._request.tools)
            except (
                Exception
            ):  # the model's parser, on what the model wrote: any error means that it is no call
                calls = None
        if self._texts is not None:
            self._texts.call_ended(answer=calls is None)
        if calls is None:
            return self._answer(block)
        self.tool_calls += calls
        return False
