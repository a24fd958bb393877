"""Tokens of one answer to its text, reasoning and tool calls, and where it ends.

This happens here, once, for every backend and every way to read an answer, so that streamed and whole are the
same. Stop strings apply to the answer, not to the reasoning. Where there are none, tokens alone say where an answer
ends, and their text is left to whoever reads it.
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
    """Append-only. The engine thread adds tokens; whoever holds the answer's reading lock reads them.

    Parameters
    ----------
    limit : int
        Tokens after which the answer ends with "length".

    Attributes
    ----------
    eager : bool
        Whether text may end the answer, so that it is read as it is written: `add` needs the reading lock, too.
    text, reasoning, tool_calls
        As far as `read`.
    """

    __slots__ = (
        "_closed", "_codec", "_detokenizer", "_ends", "_logprobs", "_read", "_request", "_splitter", "_stops",
        "_texts", "_tool", "eager", "limit", "reasoning", "text", "tokens", "tool_calls",
    )  # fmt: skip

    def __init__(self, request: Request, codec: Codec, limit: int) -> None:
        params = request.params
        self.limit = limit
        self.eager = bool(params.stop)
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
        self._read = 0
        self._closed = False
        self._tool: str | None = None
        self._texts: TokenTexts | None = None
        self._logprobs: list[TokenLogprob | None] = []
        if params.logprobs is not None:
            self._texts = TokenTexts(codec, next(reversed(request.prompt_token_ids), None))

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def mark(self) -> int:
        """How far it is, for `read`."""
        return len(self.tokens)

    def count_at(self, mark: int) -> int:
        """Tokens up to a mark."""
        return mark

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One a token, if they were asked for; a text is filled in once it is decided what it belongs to."""
        return None if self._texts is None else self._texts.logprobs

    def add(self, token_id: int, logprob: TokenLogprob | None) -> End | None:
        """Take the next token; why the answer ends here, if it does."""
        if token_id in self._ends:
            if self.eager:
                self.read(len(self.tokens), ended=True)
            return "stop"
        self.tokens.append(token_id)
        if self._texts is not None:
            self._logprobs.append(logprob)
        full = len(self.tokens) >= self.limit
        if self.eager and self.read(len(self.tokens), ended=full):
            return "stop"
        return "length" if full else None

    def read(self, mark: int, *, ended: bool) -> bool:
        """Bring the text up to a mark, and to its end if the answer has `ended`; True if a stop string did so."""
        if self._closed:
            return False
        stopped = self._advance(mark)
        if not stopped and ended:
            stopped = (
                self._push(self._detokenizer.finish())
                or self._take(self._splitter.finish())
                or self._close_tool()
            )
            if not stopped:
                self._let_through(self._stops.flush())
        if stopped or ended:
            self._closed = True
            if self._texts is not None:
                self._texts.end()
        return stopped

    def _advance(self, mark: int) -> bool:
        if self._texts is None:
            new, self._read = self.tokens[self._read : mark], mark
            return bool(new) and self._push(self._detokenizer.add(*new))
        while self._read < mark:
            token, logprob = self.tokens[self._read], self._logprobs[self._read]
            self._read += 1
            if logprob is not None:
                self._texts.add(logprob)
            if self._push(self._detokenizer.add(token)):
                return True
        return False

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
