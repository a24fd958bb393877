"""The seam between the engine and whatever makes tokens.

A backend is stepped by one thread and owns every array. It is told of requests and asked for events; what a
token means (stop, text, statistics) is decided above it, once for all backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ..codec import Codec
from ..config import EngineConfig
from ..footprint import KVFootprint
from ..outputs import LoadProgress, TokenLogprob
from ..request import Request

__all__ = [
    "Backend",
    "BackendFactory",
    "CacheStats",
    "Drafted",
    "Ended",
    "Event",
    "Fault",
    "Memory",
    "ModelInfo",
    "Prefilled",
    "Text",
    "Token",
]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` prompt tokens are in the KV cache, `cached` of them from the prefix cache."""

    request_id: str
    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of a request."""

    request_id: str
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """What a server wrote next of a request, which has its own tokenizer; `tokens` of them, as far as it is known."""

    request_id: str
    answer: str = ""
    reasoning: str = ""
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A server's end of an answer, and what it counted; `completion_tokens` is None if it doesn't say."""

    request_id: str
    reason: Literal["stop", "length"]
    tool_calls: Sequence[dict[str, Any]] = ()
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Drafted:
    """Speculation for a request: `proposed` tokens were guessed in this step, `accepted` of them rightly."""

    request_id: str
    proposed: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A request that can't go on; the backend has already dropped it."""

    request_id: str
    error: BaseException


Event = Prefilled | Token | Text | Ended | Drafted | Fault


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a loaded model; `context_length` in tokens, `weight_bytes` in bytes.

    `takes_images` and `takes_videos` say whether requests may bring any. A `remote` model is a server's, which has
    the tokenizer and the chat template: prompts are texts and `request.Chat`.
    """

    name: str = ""
    precision: str = ""
    backend: str = ""
    weight_bytes: int = 0
    context_length: int | None = None
    fingerprint: str = ""
    notes: tuple[str, ...] = ()
    takes_images: bool = False
    takes_videos: bool = False
    remote: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes.

    MLX's `active`, pooled (`cache`) and `peak` memory, the `limit` this engine keeps to, and what `weights`,
    running rows (`kv`) and stored prefixes (`prefix`) hold.
    """

    active: int = 0
    cache: int = 0
    peak: int = 0
    limit: int = 0
    weights: int = 0
    kv: int = 0
    prefix: int = 0


@dataclass(slots=True)
class CacheStats:
    """Counters of a prefix cache; `tokens_saved` are prompt tokens that were not prefilled again.

    The `vision` ones are of what the model saw in pictures: a miss is a pass of its vision tower.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    tokens_saved: int = 0
    entry_count: int = 0
    current_bytes: int = 0
    max_bytes: int = 0
    vision_hits: int = 0
    vision_misses: int = 0
    vision_entries: int = 0

    def as_dict(self) -> dict[str, float]:
        """The names and units of ``get_cache_stats``."""
        looked_up = self.hits + self.misses
        return {
            "hits": self.hits,
            "misses": self.misses,
            "hit_rate": self.hits / looked_up if looked_up else 0.0,
            "evictions": self.evictions,
            "tokens_saved": self.tokens_saved,
            "entry_count": self.entry_count,
            "current_memory_mb": self.current_bytes / 2**20,
            "max_memory_mb": self.max_bytes / 2**20,
            "memory_utilization": self.current_bytes / self.max_bytes if self.max_bytes else 0.0,
            "vision_hits": self.vision_hits,
            "vision_misses": self.vision_misses,
            "vision_entries": self.vision_entries,
        }


class Backend(Protocol):
    """Makes the tokens of many requests. Called from one thread only."""

    @property
    def codec(self) -> Codec:
        """Text to tokens and back."""
        ...

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        ...

    @property
    def check(self) -> Callable[[Request], None]:
        """Raises RequestError for anything asked that this backend can't honour.

        Called from any thread, also after `close`; so it must not hold the model.
        """
        ...

    @property
    def footprint(self) -> KVFootprint:
        """What rows cost in memory."""
        ...

    @property
    def kv_budget(self) -> int | None:
        """Bytes that the rows' caches may take together; None means no bound."""
        ...

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:
        """Take a request in; its prefill starts with the next step.

        A preempted one comes back with the tokens it has `made`, and goes on as if nothing had happened.
        """
        ...

    def reserve(self, kv_bytes: int) -> None:
        """Give up stored prefixes where that is needed for so many bytes of the rows' caches."""
        ...

    def hold_prefix(self, tokens: Sequence[int], *, held: bool) -> None:
        """Spare the prefix of exactly these tokens when others are evicted, stored by now or later; or no longer.

        Each hold needs a release of its own.
        """
        ...

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:
        """Drop requests, storing their KV state for later prompts if `keep`."""
        ...

    def next(self) -> list[Event]:
        """Do one step: at most one decode step and one prefill chunk.

        What it raises is the fault of the requests that were at work; `reset` follows.
        """
        ...

    def wake(self) -> None:
        """End a wait inside `next` early: the stepping thread is wanted. From any thread, also after `close`."""
        ...

    def reset(self) -> list[str]:
        """Drop all requests after a fault; the ids of those that had no part in it, to be inserted again."""
        ...

    def warm_up(self) -> None:
        """Compile what steps of the usual shapes need, so that the first request doesn't pay for it."""
        ...

    def memory(self) -> Memory:
        """Bytes in use now."""
        ...

    def report(self) -> dict[str, dict[str, Any]]:
        """Blocks that only this backend has in ``get_stats``; plain values."""
        ...

    def cache_stats(self) -> CacheStats | None:
        """Prefix cache counters, or None without one."""
        ...

    def clear_prefix_cache(self) -> None:
        """Forget stored prefixes and give their memory back to the system."""
        ...

    def clear_runtime_caches(self) -> dict[str, Any]:
        """Empty the prefix cache and MLX's buffer pool; says what was freed, in bytes."""
        ...

    def save_cache(self, folder: Path) -> bool:
        """Write stored prefixes; False if there is nothing to write."""
        ...

    def load_cache(self, folder: Path) -> int:
        """Read prefixes saved for this model; how many. CacheMismatchError for another's."""
        ...

    def close(self) -> None:
        """Let go of everything. The last call, on the stepping thread."""
        ...


BackendFactory = Callable[[EngineConfig, Callable[[LoadProgress], None]], Backend]
"""Makes a backend on the thread that will step it, reporting progress."""
