"""From what a caller asks to a `Request` that is fit to be queued. All refusals happen here, before queueing."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

from ..backends.base import ModelInfo
from ..codec import Codec
from ..config import SparsePrefill
from ..errors import RequestError
from ..footprint import KVFootprint
from ..request import Chat, Media, Request
from ..sampling import SamplingParams
from ..validation import flag, integer, number

__all__ = ["Intake", "Prompt", "RequestOptions"]

Prompt = str | list[int] | Chat
"""Text, token ids, or messages for a server that has the chat template."""

_MOST = 2**32


class RequestOptions(TypedDict, total=False):
    """Keyword options of a request, beside the contract's.

    Attributes
    ----------
    priority : int
        Lower goes first under the "priority" policy.
    timeout : float, optional
        Seconds from now after which it ends with TimeoutError, waiting or running.
    tools : sequence of dict, optional
        Schemas of the tools that the prompt offers; some models' calls are read with them.
    preview : str, optional
        What people are shown of the prompt.
    keep : bool
        Store its KV state for later prompts once it has ended; the checkpoint at `prefix_boundary` is in any case.
    sparse_prefill : SparsePrefill, optional
        Prefill only what matters of a long prompt; for engines of a single stream that have a draft model for it.
    """

    priority: int
    timeout: float | None
    tools: Sequence[dict[str, Any]] | None
    preview: str | None
    keep: bool
    sparse_prefill: SparsePrefill | None


class Intake:
    """Knows what a loaded model can take.

    Parameters
    ----------
    engine_id : str
        Begins the ids of requests that bring none.
    check : callable
        The backend's own refusals.
    footprint, kv_budget
        What rows cost, and may cost, in memory.
    """

    def __init__(
        self,
        engine_id: str,
        codec: Codec,
        info: ModelInfo,
        check: Callable[[Request], None],
        footprint: KVFootprint,
        kv_budget: int | None,
    ) -> None:
        self.codec = codec
        self.info = info
        self._engine_id = engine_id
        self._check = check
        self._footprint = footprint
        self._kv_budget = kv_budget
        self._numbers = itertools.count(1)

    def request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        prefix_boundary: int = 0,
        *,
        whole: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request, checked; see `Request.whole`.

        Raises
        ------
        RequestError, ValueError
            One line that says what can't be served, and what to do.
        """
        for name in options.keys() - RequestOptions.__annotations__.keys():
            raise TypeError(
                f"unknown option {name!r}: known are {', '.join(RequestOptions.__annotations__)}; max_tokens, "
                "temperature and their like are fields of SamplingParams"
            )
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be a SamplingParams, got {type(params).__name__}")
        if not isinstance(request_id, str | None):
            raise RequestError(f"request_id must be a text, got {request_id!r}")
        self._check_media(images, videos)
        asked = self._asked(prompt, images) if self.info.remote else None
        media = self._media(prompt, images, videos) if (images or videos) and asked is None else None
        tokens = [] if asked is not None else self._read(prompt, media)
        if integer("prefix_boundary", prefix_boundary, low=0) > len(tokens):
            raise RequestError(
                f"prefix_boundary {prefix_boundary} is beyond the prompt's {len(tokens)} tokens"
            )
        self._check_memory(len(tokens) + params.max_tokens)
        preview, keep = options.get("preview"), options.get("keep", True)
        flag("keep", keep)
        arrival = time.monotonic()
        request = Request(
            request_id=request_id or f"{self._engine_id}-{next(self._numbers)}",
            prompt_token_ids=tokens,
            params=params,
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            arrival=arrival,
            prefix_boundary=prefix_boundary,
            priority=integer("priority", options.get("priority", 0)),
            deadline=_deadline(arrival, options.get("timeout")),
            tools=options.get("tools"),
            preview=self._preview(prompt if preview is None else preview),
            keep=keep,
            sparse_prefill=options.get("sparse_prefill"),
            media=media,
            asked=asked,
            whole=whole,
        )
        self._check(request)
        return request

    @property
    def fits_in_memory(self) -> int | None:
        """Most tokens of a request, prompt and max_tokens together; None without a budget."""
        if self._kv_budget is None:
            return None
        return (
            bisect.bisect_right(range(_MOST), self._kv_budget, key=lambda n: self._footprint.bytes([n])) - 1
        )

    def limit(self, request: Request) -> int:
        """Tokens that its answer may have: max_tokens, or what is left of the context."""
        context = self.info.context_length
        wanted = request.params.max_tokens
        return wanted if context is None else min(wanted, context - len(request.prompt_token_ids))

    def _asked(self, prompt: Prompt, images: Sequence[Any] | None) -> str | Chat:
        """A prompt for a server, its pictures in their places."""
        if not isinstance(prompt, str | Chat):
            raise RequestError(
                "a server has the tokenizer to itself: give it text or messages, not token ids"
            )
        if not (prompt if isinstance(prompt, str) else prompt.messages):
            raise RequestError("the prompt is empty: give it a text")
        if isinstance(prompt, str):
            if images:
                raise RequestError("images act through the chat template: give messages with places for them")
            return prompt
        if not images:
            return prompt.filled(())
        from ..prompts.media import load_image

        return prompt.filled([load_image(image) for image in _listed("images", images)])

    def _read(self, prompt: Prompt, media: Media | None) -> list[int]:
        return self._fitting(self._tokens(prompt) if media is None else media.tokens)

    def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
                tokens = self.codec.encode(prompt)
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the tokenizer can't take half a character (a lone surrogate), at {error.start}: remove it"
                ) from error
            except Exception as error:
                raise RequestError(f"the tokenizer could not encode the prompt: {error}") from error
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            highest = self.codec.vocabulary_size - 1
            tokens = list(prompt)  # type: ignore[arg-type] # mypy takes it for a text
            if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) > highest:
                tokens = [integer("a prompt token id", i, low=0, high=highest) for i in tokens]
        else:
            raise RequestError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}")
        return tokens

    def _check_media(self, images: Sequence[Any] | None, videos: Sequence[Any] | None) -> None:
        name = self.info.name or "this model"
        if images and not self.info.takes_images:
            raise RequestError(f"{name} takes no images: leave them out, or choose a model that does")
        if videos and not self.info.takes_videos:
            raise RequestError(f"{name} takes no videos: leave them out, or choose a model that does")

    def _media(self, prompt: Prompt, images: Sequence[Any] | None, videos: Sequence[Any] | None) -> Media:
        from ..prompts.media import load_image, load_video  # they bring what fetches them

        pictures = [load_image(image) for image in _listed("images", images)]
        clips = [load_video(video) for video in _listed("videos", videos)]
        text = prompt if isinstance(prompt, str) else self.codec.decode(self._tokens(prompt))
        return self.codec.read_media(text, pictures, clips)

    def _fitting(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise RequestError("the prompt is empty: give at least one token")
        limit = self.info.context_length
        if limit is not None and len(tokens) >= limit:
            raise RequestError(
                f"the prompt has {len(tokens):,} tokens, and the model's context ends at {limit:,}: shorten it"
            )
        return tokens

    def _check_memory(self, length: int) -> None:
        """Refuse what would not fit even alone."""
        needed = self._footprint.bytes([min(length, self.info.context_length or length)])
        if self._kv_budget is not None and needed > self._kv_budget:
            raise RequestError(
                f"a request of {length:,} tokens needs {needed / 2**30:.2f} GiB of KV cache, and the engine has "
                f"{self._kv_budget / 2**30:.2f} GiB: shorten the prompt, or lower max_tokens"
            )

    def _preview(self, prompt: Prompt) -> str:
        text = ""
        with contextlib.suppress(
            Exception
        ):  # a tokenizer's fault here costs people a preview, and nobody an answer
            if isinstance(prompt, Chat):
                prompt = str(prompt.messages[-1].get("content", ""))
            text = prompt[:400] if isinstance(prompt, str) else self.codec.decode(prompt[:40])
        return " ".join(text.split())[:120]


def _listed(name: str, given: Sequence[Any] | None) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise RequestError(f"{name} must be a list, got {type(given).__name__}")
    return list(given)


def _deadline(arrival: float, timeout: float | None) -> float | None:
    return None if timeout is None else arrival + number("timeout", timeout, low=0)
