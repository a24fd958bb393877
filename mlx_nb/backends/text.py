"""Text to tokens and back, over the tokenizer that mlx-lm loads. Plain Python values; no arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..codec import Piece, Splitter
from ..request import Media
from ..sampling import SamplingParams
from .vision_inputs import MediaReader

__all__ = ["LeadingThought", "MarkerSplitter", "PlainSplitter", "TokenizerCodec", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"


class WindowDetokenizer:
    """Decodes a window of tokens again with what comes next, and gives the text that this adds.

    Works with every tokenizer: the text of a token may depend on the ones before it (spaces, bytes of one
    character spread over tokens), never on those before the window. Text that ends in U+FFFD is held back until
    the character is complete, or until it is clear that it never will be.
    """

    __slots__ = ("_decode", "_given", "_ids", "_start")

    # Longer than the bytes of any character: after as many tokens, the first U+FFFD is in the text itself.
    LONGEST_CHARACTER = 8

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # where the text not given yet begins; one settled stretch before it stays as context
        self._given = ""

    def add(self, *token_ids: int) -> str:
        """Text that these tokens complete."""
        self._ids += token_ids
        text = self._decode(self._ids)
        if not text.endswith(_REPLACEMENT):
            return self._advance(text, len(self._ids))
        if len(self._ids) - self._start < self.LONGEST_CHARACTER:
            return ""
        # What ends here may still be a character's beginning; find a place before it that divides no character.
        for end in range(len(self._ids) - 3, self._start, -1):
            head = self._decode(self._ids[:end])
            if head + self._decode(self._ids[end:]) == text:
                return self._advance(head, end)
        return ""

    def finish(self) -> str:
        """Text still held back."""
        return self._advance(self._decode(self._ids), len(self._ids)) if self._ids else ""

    def _advance(self, text: str, end: int) -> str:
        """Give `text`, which the tokens up to `end` make."""
        new = text[len(self._given) :]
        self._ids, self._start = self._ids[self._start :], end - self._start
        self._given = self._decode(self._ids[: self._start])
        return new


_KINDS: dict[str | None, Literal["reasoning", "tool"]] = {"reasoning": "reasoning", "tool": "tool"}


class MarkerSplitter:
    """A `Splitter` over mlx-lm's text state machine, whose states beyond these two belong to the answer."""

    __slots__ = ("_machine", "_state")

    def __init__(self, machine: Any, initial: str) -> None:
        self._machine = machine
        self._state = machine.make_state(initial)

    def push(self, text: str) -> list[Piece]:
        """Pieces of which it is clear what they are."""
        if self._state[0] is None:  # the model's format says that the answer is over
            return []
        self._state, pieces = self._machine.split(self._state, text)
        return [(_KINDS.get(state, "answer"), piece) for state, piece in pieces]

    def finish(self) -> list[Piece]:
        """What was held back."""
        self._state, text, state = self._machine.flush(self._state)
        return [(_KINDS.get(state, "answer"), text)] if text else []


class PlainSplitter:
    """A `Splitter` for models without markers."""

    __slots__ = ()

    def push(self, text: str) -> list[Piece]:
        """All of it is the answer."""
        return [("answer", text)]

    def finish(self) -> list[Piece]:
        """Nothing was held back."""
        return []


class LeadingThought:
    """A `Splitter` for structured output: one thinking block at the very start, and all else is the answer.

    Parameters
    ----------
    start, end : str
        The block's markers.
    thinking : bool
        Whether the prompt opened it.
    """

    __slots__ = ("_held", "_inside", "_start")

    def __init__(self, start: str, end: str, *, thinking: bool) -> None:
        from mlx_lm.generate import TextStateMachine

        machine = TextStateMachine({"reasoning": [(end, "answer")], "answer": []})
        self._start = "" if thinking else start  # the marker to come, until it is clear that it has, or won't
        self._held = ""
        self._inside: Splitter = MarkerSplitter(machine, "reasoning")

    def push(self, text: str) -> list[Piece]:
        """Pieces of which it is clear what they are."""
        if self._start:
            self._held += text
            if len(self._held) < len(self._start) and self._start.startswith(self._held):
                return []
            text = self._held.removeprefix(self._start)
            if text == self._held:
                self._inside = PlainSplitter()
            self._start = ""
            if isinstance(self._inside, MarkerSplitter):
                return [("answer", ""), ("reasoning", ""), *self._inside.push(text)]
        return self._inside.push(text)

    def finish(self) -> list[Piece]:
        """What was held back."""
        if self._start:
            return [("answer", self._held)] if self._held else []
        return self._inside.finish()


class TokenizerCodec:
    """A `Codec` over mlx-lm's TokenizerWrapper, or a bare Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, reader: MediaReader | None = None) -> None:
        from mlx_lm.generate import make_text_state_machine
        from mlx_lm.tokenizer_utils import TokenizerWrapper

        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        # Long prompts are refused by us, in one line; transformers would add a warning of its own.
        notices = getattr(tokenizer, "deprecation_warnings", None)
        if isinstance(notices, dict):
            notices["sequence-length-is-longer-than-the-specified-maximum"] = True
        self.chat_tokenizer = tokenizer
        self.eos_token_ids = frozenset(tokenizer.eos_token_ids)
        self.vocabulary_size = vocabulary_size
        self._reader = reader
        self._machine = (
            make_text_state_machine(tokenizer)
            if tokenizer.has_thinking or tokenizer.has_tool_calling
            else None
        )
        # The Rust tokenizer is several times faster than the Python around it, and cleans nothing up.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._fast = fast if hasattr(fast, "decode") else None
        self._alone: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids, with one BOS where the tokenizer defines one and the text has none yet."""
        bos = self.chat_tokenizer.bos_token
        add = bos is None or not text.startswith(bos)
        return list(self.chat_tokenizer.encode(text, add_special_tokens=add))

    @property
    def image_place(self) -> str:
        """What a prompt has for one picture; empty for a model that sees nothing."""
        return "" if self._reader is None else self._reader.place

    @property
    def video_place(self) -> str:
        """What a prompt has for one video; empty for a model that takes none."""
        return "" if self._reader is None else self._reader.clip_place

    def image_places(self, text: str) -> int:
        """How many pictures a prompt has places for."""
        return 0 if self._reader is None else self._reader.count(text)

    def read_media(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> Media:
        """See `MediaReader.read`."""
        assert self._reader is not None, "whoever asks looks at ModelInfo.takes_images first"
        return self._reader.read(text, pictures, clips)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        if len(token_ids) != 1:
            return self._decode(token_ids)
        (token_id,) = token_ids
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode(token_ids)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(token_ids), skip_special_tokens=False))
        return str(
            self.chat_tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def splitter(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Splitter:
        """A fresh one for one answer."""
        tokenizer = self.chat_tokenizer
        if self._machine is None:
            return PlainSplitter()
        thinking = self.opens_thinking(prompt_token_ids)
        if params.constraint is not None:
            if not tokenizer.has_thinking or params.thinking is False:
                return PlainSplitter()
            return LeadingThought(tokenizer.think_start, tokenizer.think_end, thinking=thinking)
        initial = "reasoning" if thinking else "normal"
        return MarkerSplitter(self._machine, tokenizer.response_initial_state or initial)

    def opens_thinking(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thinking block, as some templates leave it."""
        tokenizer = self.chat_tokenizer
        if not tokenizer.has_thinking:
            return False
        tokens = list(prompt_token_ids)
        begun = tokenizer.rfind_think_start(tokens)
        # A marker in an earlier turn, a question about markers say, opens nothing.
        return bool(
            begun > tokenizer.rfind_think_end(tokens) and self.eos_token_ids.isdisjoint(tokens[begun:])
        )

    def tool_calls(self, text: str, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The calls in what stood between a tool call's markers."""
        found = self.chat_tokenizer.tool_parser(text, list(tools) if tools else None)
        calls = found if isinstance(found, list) else [found]
        if not calls or not all(
            isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls
        ):
            raise ValueError("that is no call")
        return [{**call, "arguments": call.get("arguments") or {}} for call in calls]

    def detokenizer(self) -> WindowDetokenizer:
        """A fresh one for one answer."""
        return WindowDetokenizer(self.decode)
