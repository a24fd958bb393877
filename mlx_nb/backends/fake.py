"""A backend without a model, for tests and documentation: what each request answers is known beforehand.

Its tokens are the bytes of UTF-8, so characters may span tokens as they do in real models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ..codec import Piece
from ..config import EngineConfig
from ..errors import CacheMismatchError, RequestError
from ..footprint import KVFootprint
from ..outputs import LoadProgress, TokenLogprob
from ..request import Media, Request
from ..sampling import SamplingParams
from .base import BackendFactory, CacheStats, Event, Fault, Memory, ModelInfo, Prefilled, Token
from .text import WindowDetokenizer

__all__ = ["EOS", "FakeBackend", "FakeCodec", "fake_backend", "text_tokens"]

EOS = 256
Script = Callable[[Request], Iterable[int]]
"""Tokens of a request's answer, one a step. What it raises becomes that request's fault."""


def text_tokens(text: str) -> list[int]:
    """The tokens of a text."""
    return list(text.encode())


def echo(request: Request) -> Iterator[int]:
    """The default script: the prompt again, over and over."""
    while True:
        yield from request.prompt_token_ids


class _ChatTokenizer:
    """Renders tools, thinking and messages as "role: content" lines."""

    bos_token = None
    has_chat_template = has_thinking = has_tool_calling = True

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        enable_thinking: bool | None = None,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
    ) -> Any:
        lines = [f"tool {json.dumps(tool['function'])}\n" for tool in tools]
        if enable_thinking is not None:
            lines.append(f"thinking: {'on' if enable_thinking else 'off'}\n")
        for message in messages:
            calls = [_CALL.format(json.dumps(call["function"])) for call in message.get("tool_calls", ())]
            lines.append(f"{message['role']}: {_said(message['content'])}{''.join(calls)}\n")
        text = "".join(lines) + ("assistant: " if add_generation_prompt else "")
        return text_tokens(text) if tokenize else text


def _said(content: Any) -> str:
    """A message's text, with "<image>" for each image."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part.get("text", f"<{part['type']}>") for part in content)


_CALL = "<tool_call>{}</tool_call>"
_TAGS: dict[str, Literal["answer", "reasoning", "tool"]] = {
    "<think>": "reasoning", "</think>": "answer", "<tool_call>": "tool", "</tool_call>": "answer",
}  # fmt: skip


class TagSplitter:
    """Tells reasoning and tool calls by their tags."""

    def __init__(self) -> None:
        self._kind: Literal["answer", "reasoning", "tool"] = "answer"
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """All but what may be the beginning of a tag."""
        self._held += text
        pieces: list[Piece] = []
        while found := min((tag for tag in _TAGS if tag in self._held), key=self._held.index, default=None):
            before, _, self._held = self._held.partition(found)
            pieces += [(self._kind, before), (_TAGS[found], "")]
            self._kind = _TAGS[found]
        begun = self._held.rfind("<")
        keep = begun if begun >= 0 and any(tag.startswith(self._held[begun:]) for tag in _TAGS) else None
        passed, self._held = self._held[:keep], "" if keep is None else self._held[keep:]
        return [*pieces, (self._kind, passed)] if passed else pieces

    def finish(self) -> list[Piece]:
        """What was held back."""
        held, self._held = self._held, ""
        return [(self._kind, held)] if held else []


class FakeCodec:
    """Bytes, an end-of-sequence token, and tags around reasoning and tool calls."""

    def __init__(self) -> None:
        self.eos_token_ids = frozenset({EOS})
        self.vocabulary_size = EOS + 1
        self.chat_tokenizer: Any = _ChatTokenizer()

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return text_tokens(text)

    @property
    def image_place(self) -> str:
        """As the chat template writes it."""
        return "<image>"

    @property
    def video_place(self) -> str:
        """As the chat template writes it."""
        return "<video>"

    def image_places(self, text: str) -> int:
        """Counted."""
        return text.count("<image>")

    def read_media(self, text: str, pictures: Sequence[Any], clips: Sequence[Any]) -> Media:
        """The text, with pictures and clips at hand for the script."""
        tokens = text_tokens(text)
        arrays = {"pictures": list(pictures), "clips": list(clips)}
        return Media(tokens, tokens, arrays, (), len(tokens))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes to text; EOS is shown as ``<eos>``."""
        return b"".join(bytes([i]) if i < EOS else b"<eos>" for i in token_ids).decode(errors="replace")

    def splitter(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TagSplitter:
        """By ``<think>`` and ``<tool_call>``."""
        return TagSplitter()

    def tool_calls(self, text: str, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """One call, as a JSON object."""
        call = json.loads(text)
        return [{"name": call["name"], "arguments": call["arguments"]}]

    def detokenizer(self) -> WindowDetokenizer:
        """A fresh one for one answer."""
        return WindowDetokenizer(self.decode)


class _Row:
    def __init__(self, request: Request, script: Script, cached: int) -> None:
        self.request = request
        self.done = self.cached = cached
        self.tokens = iter(script(request))
        self.made: list[int] = []


class _Prefixes(set[tuple[int, ...]]):
    """Stored prefixes, looked up once for each length there is."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self._lengths: set[int] = set()

    def add(self, prefix: tuple[int, ...]) -> None:
        if prefix not in self:
            super().add(prefix)
            self.tokens += len(prefix)
            self._lengths.add(len(prefix))

    def longest_of(self, tokens: list[int]) -> int:
        """How many of the tokens, but the last, are a stored prefix."""
        fitting = (n for n in sorted(self._lengths, reverse=True) if n < len(tokens))
        return next((n for n in fitting if tuple(tokens[:n]) in self), 0)


class FakeBackend:
    """See `base.Backend`. Made by `fake_backend`."""

    footprint = KVFootprint(per_token=1)

    def __init__(
        self,
        config: EngineConfig,
        script: Script,
        step_s: float,
        context_length: int | None,
        kv_budget: int | None,
        takes_images: bool,
    ) -> None:
        self.kv_budget = kv_budget
        self.codec = FakeCodec()
        self.info = ModelInfo(
            name=config.model_name or "fake",
            precision="bytes",
            backend="no device",
            context_length=context_length,
            fingerprint="fake",
            takes_images=takes_images,
            takes_videos=takes_images,
        )
        self._script = script
        self._step_s = step_s
        self._chunk = config.scheduler_config.prefill_step_size
        self._rows: dict[str, _Row] = {}
        self._prefixes = _Prefixes() if config.scheduler_config.enable_prefix_cache else None
        self._stats = CacheStats(max_bytes=2**20)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    @staticmethod
    def check(request: Request) -> None:
        """Refuse structured output."""
        if request.params.constraint is not None:
            raise RequestError(
                f"{request.params.constraint} is not supported by the fake backend: leave it out"
            )

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """Take a request in."""
        row = _Row(request, self._script, self._covered(request.prompt_token_ids))
        row.made = [next(row.tokens) for _ in made]
        self._rows[request.request_id] = row

    def wake(self) -> None:
        """A step is short."""

    def reserve(self, kv_bytes: int) -> None:
        """Prefixes take no memory worth the name."""

    def hold_prefix(self, tokens: Sequence[int], *, held: bool) -> None:
        """None is ever evicted."""

    def reset(self) -> list[str]:
        """Drop all requests; each had its part."""
        self._rows.clear()
        return []

    def _covered(self, tokens: list[int]) -> int:
        covered = self._prefixes.longest_of(tokens) if self._prefixes is not None else 0
        if covered:
            self._stats.hits += 1
            self._stats.tokens_saved += covered
        else:
            self._stats.misses += 1
        return covered

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """Drop requests."""
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None and keep:
                self._store(row.request.prompt_token_ids[:-1])

    def _store(self, tokens: list[int]) -> None:
        if self._prefixes is not None and tokens:
            self._prefixes.add(tuple(tokens))
            self._stats.entry_count, self._stats.current_bytes = len(self._prefixes), self._prefixes.tokens

    def next(self) -> list[Event]:
        """A prefill chunk or a token for each request."""
        if self._step_s:
            time.sleep(self._step_s)
        events: list[Event] = []
        for request_id, row in list(self._rows.items()):
            total = len(row.request.prompt_token_ids)
            if row.done < total:
                before, row.done = row.done, min(total, row.done + self._chunk)
                if before < row.request.prefix_boundary <= row.done:
                    self._store(row.request.prompt_token_ids[: row.request.prefix_boundary])
                events.append(Prefilled(request_id, row.done, total, row.cached))
                continue
            try:
                token = next(row.tokens, EOS)
            except Exception as error:
                del self._rows[request_id]
                events.append(Fault(request_id, error))
                continue
            row.made.append(token)
            asked = row.request.params.logprobs is not None
            events.append(Token(request_id, token, TokenLogprob(token, 0.0, {token: 0.0}) if asked else None))
        return events

    def memory(self) -> Memory:
        """A byte a token."""
        kv = sum(row.done + len(row.made) for row in self._rows.values())
        return Memory(active=kv, limit=2**20, kv=kv, prefix=self._stats.current_bytes)

    def report(self) -> dict[str, dict[str, Any]]:
        """Nothing."""
        return {}

    def cache_stats(self) -> CacheStats | None:
        """A copy of the counters."""
        stats = self._stats
        return (
            None if self._prefixes is None else CacheStats(**{n: getattr(stats, n) for n in stats.__slots__})
        )

    def clear_prefix_cache(self) -> None:
        """Forget stored prefixes."""
        if self._prefixes is not None:
            self._prefixes = _Prefixes()
        self._stats.entry_count = self._stats.current_bytes = 0

    def clear_runtime_caches(self) -> dict[str, Any]:
        """Bytes freed."""
        freed = self._stats.current_bytes
        self.clear_prefix_cache()
        return {"prefix_cache_bytes": freed, "pool_bytes": 0}

    def save_cache(self, folder: Path) -> bool:
        """Write the stored prefixes as JSON."""
        if not self._prefixes:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fake.json").write_text(json.dumps(sorted(self._prefixes)), encoding="utf-8")
        return True

    def load_cache(self, folder: Path) -> int:
        """Read what `save_cache` wrote."""
        try:
            saved = json.loads((folder / "fake.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CacheMismatchError(f"{folder} holds no saved prefix cache") from None
        if self._prefixes is not None:
            for prefix in saved:
                self._store(prefix)
        return len(saved)

    def close(self) -> None:
        """Nothing is held."""
        self._rows.clear()


def fake_backend(
    script: Script = echo,
    *,
    step_s: float = 0.0,
    load_s: float = 0.0,
    context_length: int | None = 4096,
    kv_budget: int | None = None,
    takes_images: bool = False,
) -> BackendFactory:
    """A factory for ``EngineCore(None, None, backend=…)``.

    Parameters
    ----------
    script : callable
        Tokens of a request's answer; the default repeats the prompt for ever.
    step_s, load_s : float
        Seconds that a step and loading take.
    kv_budget : int, optional
        Tokens that all rows may have together, each as long as the longest, in steps of 256.
    takes_images : bool
        Take pictures and clips too; a script finds them in the request's ``media.arrays``.
    """

    def make(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> FakeBackend:
        on_progress(LoadProgress("load", "loading nothing", 0.5))
        if load_s:
            time.sleep(load_s)
        on_progress(LoadProgress("ready", "loaded", 1.0))
        return FakeBackend(config, script, step_s, context_length, kv_budget, takes_images)

    return make
