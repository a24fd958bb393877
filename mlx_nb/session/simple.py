"""SimpleEngine: one request at a time, at the highest speed of a single stream.

A façade over `EngineCore` with a single-stream backend. It has no loop, sampler, template or stop strings of its own;
what it owns is the shape of its calls, and who is let in.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from ..config import DraftKind, EngineConfig, SchedulerConfig, SingleStream, SparsePrefill, Speculation
from ..engine.core import EngineCore
from ..engine.intake import Prompt, RequestOptions
from ..errors import EngineBusy, RequestError
from ..outputs import GenerationOutput, LoadProgress
from ..prompts.chat import Message
from ..sampling import SamplingParams
from ..validation import choice, flag, integer
from .api import are_messages
from .media import Media, apart, taken_in, with_media
from .session import prompt_for, system_boundary_for, to_generation

__all__ = ["SimpleEngine"]

_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OPTIONS = frozenset(RequestOptions.__annotations__) - {"sparse_prefill"}
_NO_COUNTS: dict[str, Any] = {
    "target": {"calls": 0},
    "mtp": {"enabled": False, "rounds": 0, "drafts": 0, "accepted": 0},
    "specprefill": {
        "enabled": False, "requests": 0, "tokens": 0, "kept": 0, "fallbacks": 0, "last_error": None,
    },
    "system_kv_cache": {
        "capacity": 0, "in_use": 0, "total_memory_mb": 0.0, "slots": [],
        "counters": {"hits": 0, "misses": 0, "hit_ratio": 0.0, "evictions": 0, "tokens_saved": 0},
    },
}  # fmt: skip
"""The single stream's own statistics while there is no model."""


class SimpleEngine:
    """One model, one request at a time.

    Parameters
    ----------
    model_name : str
        Hub id, folder, ``.gguf`` file, alias or "demo".
    trust_remote_code : bool
        Run code that comes with the model.
    enable_cache : bool
        Keep snapshots of what prompts begin with, the system prompt above all.
    force_mllm : bool
        Refuse a model that takes no images.
    mtp, mtp_num_draft_tokens
        Speculate with the prediction heads that the model comes with, so many tokens at a time.
    prefill_step_size : int
        Upper bound of a prefill chunk, in tokens.
    specprefill_enabled, specprefill_threshold, specprefill_keep_pct, specprefill_backbone_pct
        See `SparsePrefill`; each call may say whether, and with which shares.
    specprefill_draft_model : str, optional
        The smaller model, of the same vocabulary, that chooses what is prefilled.
    max_kv_size : int
        Most tokens whose keys and values are kept, the first 4 always; 0 keeps all.
    mllm_draft_model, mllm_draft_kind, mllm_draft_block_size
        A drafter that was trained for the model; its kind ("mtp", "dflash" or "eagle3"), if it doesn't say so; how
        many tokens a step looks at, the last one and the guesses after it. With it the model is mlx-vlm's.
    draft_model : str, optional
        A smaller language model of the same vocabulary that guesses ahead.
    draft_kind : str, optional
        "prompt_lookup" guesses from the text so far, without a second model.
    num_draft_tokens : int, optional
        Guesses a step.
    admission : {"wait", "fail"}
        What a call does while another is at work; each call may say otherwise.

    Raises
    ------
    UnknownModelError, ValueError
        At once. What loading raises comes from `start` or the first call.
    """

    def __init__(
        self,
        model_name: str,
        trust_remote_code: bool = False,
        enable_cache: bool = True,
        force_mllm: bool = False,
        mtp: bool = False,
        mtp_num_draft_tokens: int = 1,
        prefill_step_size: int = 2048,
        specprefill_enabled: bool = False,
        specprefill_threshold: int = 8192,
        specprefill_keep_pct: float = 0.3,
        specprefill_backbone_pct: float = 0.0,
        specprefill_draft_model: str | None = None,
        max_kv_size: int = 0,
        mllm_draft_model: str | None = None,
        mllm_draft_kind: str | None = None,
        mllm_draft_block_size: int | None = None,
        *,
        draft_model: str | None = None,
        draft_kind: str | None = None,
        num_draft_tokens: int | None = None,
        admission: Literal["wait", "fail"] = "wait",
        adapter_path: str | Path | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        from ..backends.pretrained import Pretrained

        self._admission = _admission(admission)
        self._sparse = SparsePrefill(specprefill_threshold, specprefill_keep_pct, specprefill_backbone_pct)
        if specprefill_enabled and specprefill_draft_model is None:
            raise ValueError(
                "specprefill_enabled needs specprefill_draft_model, a smaller model of the same vocabulary"
            )
        self._sparsely = specprefill_enabled
        flag("mtp", mtp)
        if mtp_num_draft_tokens != 1 and not mtp:
            raise ValueError(
                "mtp_num_draft_tokens goes with mtp=True: num_draft_tokens is that of other drafts"
            )
        speculations = [
            _speculation(draft_kind, draft_model, num_draft_tokens),
            Speculation("mtp", None, mtp_num_draft_tokens) if mtp else None,
            _drafter(mllm_draft_kind, mllm_draft_model, mllm_draft_block_size),
        ]
        wanted = [each for each in speculations if each is not None]
        if len(wanted) > 1:
            raise ValueError(
                "mtp, mllm_draft_model and draft_model are one or the other: leave out all but one"
            )
        single = SingleStream(wanted[0] if wanted else None, specprefill_draft_model)
        factory = Pretrained(
            model_name, adapter_path=adapter_path, trust_remote_code=trust_remote_code, single=single
        )
        scheduler = SchedulerConfig(
            max_num_seqs=1,
            prefill_step_size=prefill_step_size,
            enable_prefix_cache=enable_cache,
            max_kv_size=max_kv_size,
        )
        config = EngineConfig(model_name=factory.name, scheduler_config=scheduler)
        self._core = EngineCore(None, None, config, backend=factory, on_progress=on_progress)
        self._force_mllm = force_mllm
        self._door = threading.Lock()

    @property
    def engine(self) -> EngineCore:
        """The engine behind it."""
        return self._core

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self._core.model_name

    @property
    def is_mllm(self) -> bool:
        """Whether the model takes images; False until it is loaded."""
        return self._core.info.takes_images

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; after loading."""
        return self._core.codec.chat_tokenizer

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model, and wait until it is there. Idempotent."""
        await self._core.start()
        self._check_loaded()

    def prepare_for_start(self) -> None:
        """Load the model now, on its own thread, and wait for it; `start` has nothing left to do then."""
        self._core.launch()
        self._core.wait_ready()
        self._check_loaded()

    async def stop(self) -> None:
        """End every request with EngineStopped, and let the model go. `start` works again."""
        await self._core.stop()

    def close(self) -> None:
        """`stop`, for a plain thread and for good."""
        self._core.close()

    async def __aenter__(self) -> SimpleEngine:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def _check_loaded(self) -> None:
        if self._force_mllm and not self.is_mllm:
            self._core.stop_soon()
            raise RequestError(
                f"{self.model_name} takes no images: leave force_mllm out, or choose another model"
            )

    # -- requests ---------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float = 0.9,
        stop: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> GenerationOutput:
        """The answer to a raw prompt; cancelling ends the work at the next token or prefill chunk.

        Parameters
        ----------
        prompt : str or list of int
            Raw text, or token ids. No chat template is applied.
        **kwargs
            Other fields of `SamplingParams`; `RequestOptions`; images and videos, of anything that `load_image` and
            `load_video` take; admission; specprefill, specprefill_keep_pct, specprefill_backbone_pct.

        Raises
        ------
        EngineBusy
            With ``admission="fail"`` while another request is at work.
        RequestError
            For a prompt or a parameter that can't be honoured.
        """
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop}
        return await _last(await self._ask(prompt, {**params, **kwargs}))

    async def stream_generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float = 0.9,
        stop: str | Sequence[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationOutput]:
        """`generate`, piece by piece: `new_text` is what came with each. Leaving early aborts the request."""
        params = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "stop": stop}
        async for output in await self._ask(prompt, {**params, **kwargs}):
            yield output

    async def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float = 0.9,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> GenerationOutput:
        """The assistant's next turn, by the model's chat template; `kwargs` as in `generate`.

        Parameters
        ----------
        messages : list of dict
            Contents may be parts, ``{"type": "image", "image": …}`` and ``{"type": "text", "text": …}``.
        images, videos : list, optional
            For the parts that are bare, ``{"type": "image"}``; without such, for the last question.
        """
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, **kwargs}
        return await _last(await self._ask_chat(messages, tools, images, videos, given))

    async def stream_chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 256,
        temperature: float = 0.7,
        top_p: float = 0.9,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationOutput]:
        """`chat`, piece by piece."""
        given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, **kwargs}
        async for output in await self._ask_chat(messages, tools, images, videos, given):
            yield output

    async def _ask_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        images: Sequence[Any] | None,
        videos: Sequence[Any] | None,
        given: dict[str, Any],
    ) -> AsyncIterator[GenerationOutput]:
        if not are_messages(messages):
            raise RequestError('messages are a list such as [{"role": "user", "content": "Hello"}]')
        await self._started()
        media = await taken_in(images, videos)
        asked: Sequence[Message] = messages
        if media or any(not isinstance(message.get("content"), str | None) for message in messages):
            asked, media = await asyncio.to_thread(_apart, messages, media)
            media.check(self._core)
        schemas = None if tools is None else _schemas(tools)
        thinking = given.get("thinking")
        prompt = prompt_for(self._core, asked, thinking=thinking, tools=schemas)
        boundary = system_boundary_for(self._core, asked, prompt, thinking=thinking, tools=schemas)
        options = {"prefix_boundary": boundary, "tools": schemas, **media.options()}
        return await self._ask(prompt, {**options, **given})

    async def _ask(self, prompt: Prompt, given: dict[str, Any]) -> AsyncIterator[GenerationOutput]:
        """Queue a request; its outputs. `given` is what the caller named."""
        await self._started()
        sparse = self._sparse_prefill(given)
        admission = _admission(given.pop("admission", self._admission))
        params = SamplingParams(**{name: given.pop(name) for name in _FIELDS & given.keys()})
        options = {name: given.pop(name) for name in _OPTIONS & given.keys()}
        named = {name: given.pop(name) for name in ("request_id", "prefix_boundary") if name in given}
        media = await taken_in(given.pop("images", None), given.pop("videos", None))
        media.check(self._core)
        if given:
            raise ValueError(f"unknown parameter {min(given)!r}")
        with self._door:
            if admission == "fail" and (holder := self._core.holder()) is not None:
                raise EngineBusy(f"the engine is busy with {holder}: wait for it, abort it, or ask to wait")
            request_id = self._core.submit(
                prompt, params, **named, **media.options(), **options, sparse_prefill=sparse
            )
        return _outputs(self._core, request_id, params)

    async def _started(self) -> None:
        if self._core.is_running():
            await self._core.ready()
        else:
            await self.start()

    def _sparse_prefill(self, given: dict[str, Any]) -> SparsePrefill | None:
        wanted = given.pop("specprefill", None)
        if wanted is not None:
            flag("specprefill", wanted)
        shares = {name: given.pop(f"specprefill_{name}", None) for name in ("keep_pct", "backbone_pct")}
        changes = {name: share for name, share in shares.items() if share is not None}
        sparse = dataclasses.replace(self._sparse, **changes)
        # A share that is named asks for it as well, or is refused where it can't be had.
        wanted = (self._sparsely or bool(changes)) if wanted is None else wanted
        return sparse if wanted else None

    # -- statistics -------------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """As `EngineCore.get_stats`, with engine_type, is_mllm, and blocks of what speeds it up."""
        stats = self._core.get_stats()
        return {
            "engine_type": "simple",
            **copy.deepcopy(_NO_COUNTS),
            **stats,
            "is_mllm": self.is_mllm,
            "admission": self._admission,
        }

    def get_cache_stats(self) -> dict[str, float] | None:
        """As `EngineCore.get_cache_stats`."""
        return self._core.get_cache_stats()

    def clear_runtime_caches(self) -> dict[str, Any] | None:
        """As `EngineCore.clear_runtime_caches`."""
        return self._core.clear_runtime_caches()


async def _outputs(
    core: EngineCore, request_id: str, params: SamplingParams
) -> AsyncIterator[GenerationOutput]:
    stream = core.stream_outputs(request_id)
    try:
        async for output in stream:
            yield to_generation(output, params)
    finally:
        await stream.aclose()


async def _last(outputs: AsyncIterator[GenerationOutput]) -> GenerationOutput:
    last = None
    async for output in outputs:
        last = output
    assert last is not None
    return last


def _apart(messages: Sequence[Message], media: Media) -> tuple[list[Message], Media]:
    return apart(with_media(messages, media))


def _schemas(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools must be a list of schemas, got {tools!r}")
    return [dict(tool) for tool in tools]


def _admission(value: str) -> Literal["wait", "fail"]:
    choice("admission", value, ("wait", "fail"))
    return value  # type: ignore[return-value]


def _speculation(kind: str | None, model: str | None, tokens: int | None) -> Speculation | None:
    if kind is None and model is None:
        if tokens is not None:
            raise ValueError("num_draft_tokens goes with draft_model or draft_kind")
        return None
    return Speculation(cast(DraftKind, kind or "model"), model, tokens)


def _drafter(kind: str | None, model: str | None, block_size: int | None) -> Speculation | None:
    if model is None:
        if kind is not None or block_size is not None:
            raise ValueError("mllm_draft_kind and mllm_draft_block_size go with mllm_draft_model")
        return None
    if kind is not None:
        choice("mllm_draft_kind", kind, ("mtp", "dflash", "eagle3"))
    if block_size is not None:
        integer("mllm_draft_block_size", block_size, low=2, high=65)
    # A block is the last token and the guesses after it.
    return Speculation(
        cast(DraftKind, kind or "drafter"), model, None if block_size is None else block_size - 1
    )
