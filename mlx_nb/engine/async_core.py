"""AsyncEngineCore: the handle that lives on a notebook's event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from ..config import EngineConfig, SingleStream
from ..errors import RequestError
from ..outputs import LoadProgress, RequestOutput
from ..remote import Remote
from ..sampling import SamplingParams
from .core import EngineCore
from .intake import Prompt, RequestOptions
from .stream import OutputStream

__all__ = ["AsyncEngineCore"]


class AsyncEngineCore:
    """An `EngineCore` that starts without being awaited and may be used from any loop and any thread.

    Use it as ``async with AsyncEngineCore(model, tokenizer) as engine:``, or `start` and ``await stop()``.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig | None = None) -> None:
        self._engine = EngineCore(model, tokenizer, config)

    @classmethod
    def over(cls, engine: EngineCore) -> AsyncEngineCore:
        """A handle on an engine that exists."""
        handle = cls.__new__(cls)
        handle._engine = engine
        return handle

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
        single: SingleStream | None = None,
        distributed: bool = False,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> AsyncEngineCore:
        """An engine that loads its model on its own thread once it is started.

        Parameters
        ----------
        model : str or Path
            Hub id, folder, ``.gguf`` file, alias or "demo".
        single : SingleStream, optional
            Run one request at a time, at the speed of a single stream.
        distributed : bool
            Divide the model among the processes that mlx.launch started with this one.
        on_progress : callable, optional
            Gets `LoadProgress` on the engine thread.

        Raises
        ------
        RequestError
            With `distributed`, in a process that is alone or not the first, or with what it can't be divided with.
        UnknownModelError
            At once, for a name that is none of these. What loading raises comes from `start` or the first use.
        """
        factory: Any
        if distributed:
            from ..backends.distributed import Distributed

            if adapter_path is not None or single is not None:
                raise RequestError("a model over several processes takes no adapter, and is no single stream")
            factory = Distributed(str(model), trust_remote_code=trust_remote_code)
        else:
            from ..backends.pretrained import Pretrained

            factory = Pretrained(
                str(model), adapter_path=adapter_path, trust_remote_code=trust_remote_code, single=single
            )
        config = config or EngineConfig(model_name=factory.name)
        if single is not None:
            config = replace(config, scheduler_config=replace(config.scheduler_config, max_num_seqs=1))
        return cls.over(EngineCore(None, None, config, backend=factory, on_progress=on_progress))

    @classmethod
    def remote(
        cls,
        remote: Remote,
        config: EngineConfig | None = None,
        *,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> AsyncEngineCore:
        """An engine that drives a server of OpenAI's API once it is started.

        Raises
        ------
        RemoteError
            At once, without the openai package. What connecting raises comes from `start` or the first use.
        """
        from ..backends.remote import remote_backend

        factory = remote_backend(remote)
        config = config or EngineConfig()
        scheduler = replace(
            config.scheduler_config,
            max_num_seqs=remote.concurrency,
            completion_batch_size=remote.concurrency,
            enable_prefix_cache=False,  # the server keeps prefixes of its own
        )
        config = replace(config, scheduler_config=scheduler)
        return cls.over(EngineCore(None, None, config, backend=factory, on_progress=on_progress))

    @property
    def engine(self) -> EngineCore:
        """The engine behind this handle."""
        return self._engine

    @property
    def engine_id(self) -> str:
        """The engine's id."""
        return self._engine.engine_id

    async def __aenter__(self) -> AsyncEngineCore:
        await self._engine.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._engine.stop()

    def start(self) -> None:
        """Start the engine thread and return at once; what is asked meanwhile waits for it."""
        self._engine.launch()

    async def stop(self) -> None:
        """As `EngineCore.stop`."""
        await self._engine.stop()

    def pause(self) -> None:
        """As `EngineCore.pause`."""
        self._engine.pause()

    def resume(self) -> None:
        """As `EngineCore.resume`."""
        self._engine.resume()

    def is_running(self) -> bool:
        """As `EngineCore.is_running`."""
        return self._engine.is_running()

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        prefix_boundary: int = 0,
        **options: Unpack[RequestOptions],
    ) -> str:
        """As `EngineCore.add_request`."""
        return await self._engine.add_request(
            prompt, sampling_params, request_id, images, videos, prefix_boundary, **options
        )

    async def abort_request(self, request_id: str) -> bool:
        """As `EngineCore.abort_request`."""
        return self._engine.abort(request_id)

    def stream_outputs(self, request_id: str, timeout: float | None = None) -> OutputStream:
        """As `EngineCore.stream_outputs`."""
        return self._engine.stream_outputs(request_id, timeout)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> RequestOutput:
        """As `EngineCore.generate`."""
        return await self._engine.generate(prompt, sampling_params, request_id, **kwargs)

    def generate_batch_sync(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """As `EngineCore.generate_batch_sync`."""
        return self._engine.generate_batch_sync(prompts, sampling_params, errors=errors)

    def stream_sync(self, request_id: str, timeout: float | None = None) -> Iterator[RequestOutput]:
        """As `EngineCore.stream_sync`."""
        return self._engine.stream_sync(request_id, timeout)

    def get_stats(self) -> dict[str, Any]:
        """As `EngineCore.get_stats`."""
        return self._engine.get_stats()

    def get_cache_stats(self) -> dict[str, float] | None:
        """As `EngineCore.get_cache_stats`."""
        return self._engine.get_cache_stats()

    def save_cache_to_disk(self, cache_dir: str | Path) -> bool:
        """As `EngineCore.save_cache_to_disk`."""
        return self._engine.save_cache_to_disk(cache_dir)

    def load_cache_from_disk(self, cache_dir: str | Path) -> int:
        """As `EngineCore.load_cache_from_disk`."""
        return self._engine.load_cache_from_disk(cache_dir)

    def clear_prefix_cache(self) -> None:
        """As `EngineCore.clear_prefix_cache`."""
        self._engine.clear_prefix_cache()

    async def warm_up(self) -> None:
        """As `EngineCore.warm_up`."""
        await self._engine.warm_up()

    def clear_runtime_caches(self) -> dict[str, Any] | None:
        """As `EngineCore.clear_runtime_caches`."""
        return self._engine.clear_runtime_caches()

    def close(self) -> None:
        """As `EngineCore.close`."""
        self._engine.close()
