"""Which token wrote what: the text of each, and the part of the answer that it belongs to.

Used only where log-probabilities are asked for. It is told what the splitter and the stop strings decide, character
by character, since both hold text back, and decides nothing itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..codec import Codec
from ..outputs import TokenLogprob, TokenPart

__all__ = ["TokenTexts"]

_Mark = tuple[int, str]  # the index of a token, and a character it wrote


class TokenTexts:
    """Log-probabilities of one answer's tokens, with their texts as soon as these are known."""

    def __init__(self, codec: Codec, context: int | None) -> None:
        self.logprobs: list[TokenLogprob] = []
        self._codec = codec
        self._context = [] if context is None else [context]
        self._alone: dict[int, str] = {}
        self._unread: deque[_Mark] = deque()  # not decided what part of the answer it is
        self._tool: deque[_Mark] = deque()
        self._held: deque[_Mark] = deque()  # may be the beginning of a stop string
        self._silent: list[int] = []  # tokens that have written nothing yet
        self._before: dict[int, list[int]] = {}  # those that ended in the middle of a token's first character
        self._open: dict[int, int] = {}  # characters of a token of which it is not clear what they are
        self._texts: dict[int, tuple[str, TokenPart]] = {}  # what is clear of tokens that are not decided

    def add(self, logprob: TokenLogprob) -> None:
        """Take the next token, with the texts of its alternatives."""
        first = not self.logprobs
        texts = {token: self._text(token, first=first) for token in logprob.top}
        self._silent.append(len(self.logprobs))
        self.logprobs.append(replace(logprob, top_texts=texts))

    def _text(self, token: int, *, first: bool) -> str:
        """What a token would add: some tokenizers drop the space before it where nothing precedes it."""
        if first:
            return self._codec.decode([token])
        text = self._alone.get(token)
        if text is None:
            before = self._codec.decode(self._context)
            both = self._codec.decode([*self._context, token])
            text = both[len(before) :] if both.startswith(before) else self._codec.decode([token])
            self._alone[token] = text
        return text

    def wrote(self, text: str) -> None:
        """Note what the last token wrote."""
        if not (text and self.logprobs):
            return
        last = len(self.logprobs) - 1
        self._before.setdefault(last, [token for token in self._silent if token != last])
        self._silent.clear()
        self._open[last] = self._open.get(last, 0) + len(text)

    def read(self, character: str) -> None:
        """Note that the splitter has seen a character of what the last token wrote."""
        self._unread.append((len(self.logprobs) - 1, character))

    def reasoned(self, length: int) -> None:
        """Note that so many characters are reasoning."""
        self._settle(_take(self._unread, length), "reasoning")

    def answered(self, length: int) -> None:
        """Note that so many characters belong to the answer, unless they are part of a stop string."""
        self._held += _take(self._unread, length)

    def called(self, length: int) -> None:
        """Note that so many characters may be a call of a tool."""
        self._tool += _take(self._unread, length)

    def call_ended(self, *, answer: bool) -> None:
        """Note that what may have been a call was one, or that it belongs to the answer."""
        if answer:
            self._held += self._tool
        else:
            self._settle(list(self._tool), "tool")
        self._tool.clear()

    def passed(self, length: int) -> None:
        """Note that the stop strings let so many characters through."""
        self._settle(_take(self._held, length), "answer")

    def marked(self) -> None:
        """Note that all that was read and is no text was a marker."""
        self._settle(_take(self._unread, len(self._unread)), "marker")

    def end(self) -> None:
        """Note that nothing follows: what was never let through is no text."""
        self._settle(_take(self._held, len(self._held)), "stop")
        self.call_ended(answer=False)
        self.marked()
        for index in list(self._texts):  # a stop string ended the answer in the middle of a token
            self._decide(index)
        part: TokenPart = "answer"
        for index, token in enumerate(self.logprobs):
            if token.part is None:  # wrote nothing at all
                self.logprobs[index] = replace(token, part=part)
            else:
                part = token.part

    def _settle(self, marks: list[_Mark], part: TokenPart) -> None:
        for index, character in marks:
            text, kind = self._texts.get(index, ("", part))
            if kind == part:
                self._texts[index] = text + character, part
            elif kind in _NO_TEXT:  # a token with half a marker is the text beside it
                self._texts[index] = character, part
            self._open[index] -= 1
            if not self._open[index]:
                self._decide(index)

    def _decide(self, index: int) -> None:
        """Give out what a token wrote: it is clear what all of it is."""
        text, part = self._texts[index]
        for before in self._before.pop(index, ()):
            self.logprobs[before] = replace(self.logprobs[before], part=part)
        self.logprobs[index] = replace(self.logprobs[index], text=text, part=part)
        if index < len(self.logprobs) - 1:  # the last one may write more at the end
            del self._open[index], self._texts[index]


_NO_TEXT = ("marker", "stop")


def _take(marks: deque[_Mark], count: int) -> list[_Mark]:
    return [marks.popleft() for _ in range(count)]
