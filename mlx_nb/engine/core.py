"""EngineCore: a thread-safe door to one engine thread.

Submitting and aborting take a lock and set state; nothing here waits for an event loop except its own callers,
so the engine may be used from any loop and any thread at once, a kernel's busy main thread included.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack

from ..backends.base import Backend, BackendFactory, ModelInfo
from ..codec import Codec
from ..config import EngineConfig
from ..errors import EngineNotStarted, EngineStopped, RequestError
from ..outputs import LoadProgress, RequestOutput
from ..request import Chat, Request, RequestStatus
from ..sampling import SamplingParams
from .answer import Answer, Cursor
from .intake import Intake, Prompt, RequestOptions
from .ownership import claim, reclaim, release
from .stats import Counters
from .stream import OutputStream
from .waiting import ThreadNews, on_loop, on_thread
from .worker import Worker, stopped_error

__all__ = ["EngineCore"]

T = TypeVar("T")

_LIVE = {status.value for status in RequestStatus if not status.is_finished()}
_ANY = Chat(({"role": "user", "content": "?"},))
UNREAD_KEPT = 1024
"""Finished answers kept for a consumer that has not come yet."""


class EngineCore:
    """A continuous-batching engine around one model.

    Parameters
    ----------
    model, tokenizer
        As `mlx_lm.load` returns them.
    config : EngineConfig, optional
    engine_id : str, optional
        Made up when not given.
    force_model_ownership : bool
        If another engine owns the model object: take it over (that engine is stopped), or raise
        ModelOwnershipError.
    backend : BackendFactory, optional
        Makes the backend on the engine thread, in place of one for `model` and `tokenizer`.
    on_progress : callable, optional
        Gets `LoadProgress` on the engine thread.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig | None = None,
        engine_id: str | None = None,
        force_model_ownership: bool = True,
        *,
        backend: BackendFactory | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self._worker: Worker | None = None
        self.config = config or EngineConfig()
        self.engine_id = engine_id or f"engine-{uuid.uuid4().hex[:8]}"
        self._factory: BackendFactory | None = backend or _batch_backend(model, tokenizer)
        self._on_progress = on_progress
        self.progress: LoadProgress | None = None
        self._counters = Counters()
        self._lock = threading.Lock()
        self._answers: dict[str, Answer] = {}
        self._intake: Intake | None = None
        self._evicting: Worker | None = None
        self._model_key = None if model is None else id(model)
        if model is not None:
            self._evicting = claim(model, self, force=force_model_ownership)

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop(EngineStopped("the engine was deleted"))

    # -- life -------------------------------------------------------------------------------------------

    @property
    def state(self) -> Literal["new", "loading", "running", "stopped", "failed", "closed"]:
        """Where the engine is in its life."""
        if self._factory is None:
            return "closed"
        return "new" if self._worker is None else self._worker.state  # type: ignore[return-value]

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine thread, if it was a fault."""
        return self._worker.failure if self._worker else None

    @property
    def model_name(self) -> str:
        """The configured name, or the loaded model's."""
        return self.config.model_name or self.info.name

    @property
    def info(self) -> ModelInfo:
        """What is known of the model; complete once it is loaded."""
        return self._intake.info if self._intake else ModelInfo(name=self.config.model_name)

    @property
    def max_context(self) -> int | None:
        """Tokens that prompt and answer may have together, if the model says."""
        return self.info.context_length

    @property
    def max_in_memory(self) -> int | None:
        """Tokens that a prompt and its `max_tokens` may have together, if memory is bounded; after loading."""
        return self._open().fits_in_memory

    @property
    def codec(self) -> Codec:
        """Text to token ids and back; after loading."""
        return self._open().codec

    def is_running(self) -> bool:
        """Whether requests are taken: loaded, or loading."""
        return self.state in ("loading", "running")

    def launch(self) -> None:
        """Start the engine thread and return at once. Idempotent; also starts a stopped engine again."""
        reclaim(self._model_key, self)
        with self._lock:
            if self._factory is None:
                raise EngineStopped("the engine is closed; make a new one")
            if self._worker is not None and self._worker.state in ("loading", "running"):
                if self._worker.ending:
                    previous: Worker | None = self._worker
                else:
                    return
            else:
                previous = self._evicting
            self._evicting = self.progress = None
            self._worker = worker = Worker(self.config, self._factory, self._counters, _Progress(self))
            worker.when_ready(_Adopt(self, worker))
            worker.start(after=previous)

    async def start(self) -> None:
        """Start, and wait until the model is loaded. Raises what loading raised."""
        self.launch()
        await self.ready()

    async def ready(self) -> None:
        """Wait until loading has ended; raise what it raised, or EngineNotStarted without any start."""
        worker = self._started()
        await on_loop(worker.when_ready)
        self._check_loaded(worker)

    def wait_ready(self, timeout: float | None = None) -> None:
        """`ready` for a plain thread; TimeoutError after `timeout` seconds."""
        worker = self._started()
        if not on_thread(worker.when_ready, timeout):
            raise TimeoutError(f"the model was not loaded within {timeout} s")
        self._check_loaded(worker)

    async def stop(self) -> None:
        """End every live request with EngineStopped and the engine thread with them. `start` works again."""
        worker = self.stop_soon()
        if worker is not None:
            await on_loop(worker.when_over)
            worker.join()

    def stop_soon(self, reason: BaseException | None = None) -> Worker | None:
        """Tell the engine to stop and return at once; the worker that is ending, if any."""
        worker = self._worker
        if worker is None:
            return None
        reason = reason or EngineStopped(
            "the engine was stopped before this request was finished; start it again"
        )
        worker.stop(reason)
        # Consumers hear of it now, even if the thread is in the middle of a long step.
        for answer in self._live():
            answer.finish(RequestStatus.FINISHED_ERROR, reason)
        return worker

    def restart_soon(self) -> None:
        """Stop what is left, start again, and return at once."""
        self.stop_soon()
        self.launch()

    def pause(self) -> None:
        """Start no more requests until `resume`: those that run go on, others are taken and wait. Returns at once.

        Raises EngineNotStarted or EngineStopped if there is nothing to pause. A restarted engine isn't paused.
        """
        self._started().pause(True)

    def resume(self) -> None:
        """Undo `pause`."""
        self._started().pause(False)

    @property
    def paused(self) -> bool:
        """Whether requests are left waiting."""
        return self._worker is not None and self._worker.paused and self.is_running()

    def stop_now(self, timeout: float | None = None) -> None:
        """`stop` for a plain thread."""
        worker = self.stop_soon()
        if worker is not None:
            worker.join(timeout)

    def close(self) -> None:
        """Stop and let go of the model for good."""
        self.stop_now()
        self._factory = None
        self._intake = None
        release(self)

    def _started(self) -> Worker:
        if self._worker is None:
            raise EngineNotStarted("the engine is not started: call start() first")
        return self._worker

    def _open(self) -> Intake:
        if self._intake is None:
            raise EngineNotStarted("the engine is not loaded yet: call start() and wait for it")
        return self._intake

    def _check_loaded(self, worker: Worker) -> None:
        if worker.state == "failed" and worker.failure is not None:
            raise worker.failure
        if worker.state != "running":
            raise stopped_error(worker)

    # -- requests ---------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        prefix_boundary: int = 0,
        *,
        on_done: Callable[[RequestOutput], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """`add_request` from any thread; waits for a model that is still loading.

        Parameters
        ----------
        on_done : callable, optional
            Gets the final output (errors included) on the engine's thread or the aborting one; it must not
            block. The request then has no other consumer and is forgotten when it ends.
        """
        self.wait_ready()
        request = self._open().request(
            prompt,
            sampling_params,
            request_id,
            images,
            videos,
            prefix_boundary,
            whole=on_done is not None,
            **options,
        )
        self._enqueue([request], on_done)
        return request.request_id

    def check(self, sampling_params: SamplingParams, prompt: Prompt | None = None) -> None:
        """Refuse what `submit` would refuse: the parameters, with any prompt or this one. Waits for the model."""
        self.wait_ready()
        if prompt is None:
            prompt = _ANY if self.info.remote else [0]
        self._open().request(prompt, sampling_params)

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
        """Queue a request and return its id.

        Parameters
        ----------
        prompt : str or list of int
            Raw text, or token ids. No chat template is applied here.
        prefix_boundary : int
            Tokens of the prompt that later requests will share; the prefix cache checkpoints there.
        **options
            See `RequestOptions`.

        Raises
        ------
        RequestError
            Empty or over-long prompt, duplicate id, a parameter the backend can't honour. Nothing is queued.
        EngineNotStarted, EngineStopped
        """
        await self.ready()
        return self.submit(prompt, sampling_params, request_id, images, videos, prefix_boundary, **options)

    async def abort_request(self, request_id: str) -> bool:
        """End a request with reason "abort" and the text it has; True if it was live."""
        return self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """`abort_request` from any thread, at once."""
        answer = self._answers.get(request_id)
        if answer is None or not answer.finish(RequestStatus.FINISHED_ABORTED):
            return False
        if self._worker is not None:
            self._worker.discard(answer)
        return True

    def holder(self) -> str | None:
        """Which request is at work or waits first, in words; None if the engine is free.

        One that was aborted holds it until its work has ended.
        """
        worker = self._worker
        held = None if worker is None else worker.first()
        if held is None:
            waiting = self._live()
            held = waiting[0] if waiting else None
        if held is None:
            return None
        request = held.request
        elapsed = time.monotonic() - request.arrival
        return f"request {request.request_id} ({request.preview!r}, for {elapsed:.1f} s)"

    def abort_all(self) -> int:
        """Abort every live request; how many there were."""
        return sum(self.abort(answer.request.request_id) for answer in self._live())

    def stream_outputs(self, request_id: str, timeout: float | None = None) -> OutputStream:
        """Iterate over a request's outputs (``async for``) until it is finished.

        Leaving early in any way aborts the request. A request that failed raises its exception; `timeout`
        seconds without any output raise TimeoutError.
        """
        return OutputStream(self, self._answer(request_id), self.config.step_interval, timeout)

    def stream_sync(self, request_id: str, timeout: float | None = None) -> Iterator[RequestOutput]:
        """`stream_outputs` for a plain thread."""
        answer = self._answer(request_id)
        cursor, news = Cursor(), ThreadNews(answer)
        try:
            while not cursor.finished:
                output = answer.take(cursor)
                if output is None:
                    news.wait(timeout)
                elif output.error is not None:
                    raise output.error
                else:
                    yield output
        finally:
            news.close()
            self.release(answer)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> RequestOutput:
        """The final output. `kwargs` are those of `add_request`; cancelling aborts the request."""
        request_id = await self.add_request(prompt, sampling_params, request_id, **kwargs)
        answer = self._answer(request_id)
        try:
            await on_loop(answer.on_finish)
        finally:
            self.release(answer)
        return _result(answer)

    def generate_sync(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **kwargs: Any,
    ) -> RequestOutput:
        """`generate` for a plain thread, or a cell that awaits nothing."""
        answer = self._answer(self.submit(prompt, sampling_params, request_id, **kwargs))
        try:
            on_thread(answer.on_finish)
        finally:
            self.release(answer)
        return _result(answer)

    def generate_batch_sync(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Outputs of several prompts, in order; with or without a running event loop.

        Parameters
        ----------
        sampling_params : SamplingParams or sequence of them
            One for all, or one per prompt.
        errors : {"raise", "return"}
            "raise": a bad prompt rejects the call before anything is queued, and a fault is raised once all are
            done. "return": either becomes the `error` of its own output.
        """
        self.wait_ready()
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', got {errors!r}")
        if isinstance(prompts, str):
            raise RequestError("prompts is a list of prompts: put a single text in one")
        prompts = list(prompts)
        rejected: dict[int, RequestOutput] = {}
        requests: dict[int, Request] = {}
        for i, (prompt, params) in enumerate(
            zip(prompts, _one_each(sampling_params, len(prompts)), strict=True)
        ):
            try:
                requests[i] = self._open().request(prompt, params)
            except ValueError as error:
                if errors == "raise":
                    raise
                rejected[i] = RequestOutput(
                    f"rejected-{i}", finished=True, finish_reason="error", error=error
                )
        answers = dict(zip(requests, self._enqueue(list(requests.values())), strict=True))
        try:
            for answer in answers.values():
                on_thread(answer.on_finish)
        finally:
            for answer in answers.values():
                self.release(answer)
        if errors == "raise":
            return [_result(answer) for answer in answers.values()]
        return [rejected[i] if i in rejected else answers[i].final() for i in range(len(prompts))]

    def _enqueue(
        self, requests: list[Request], on_done: Callable[[RequestOutput], None] | None = None
    ) -> list[Answer]:
        worker, intake, interval = self._started(), self._open(), self.config.stream_interval
        answers = [
            Answer(request, intake.codec, limit=intake.limit(request), stream_interval=interval)
            for request in requests
        ]
        with self._lock:
            for request in requests:
                known = self._answers.get(request.request_id)
                # An aborted one has nothing that anybody waits for.
                if known is not None and known.status is not RequestStatus.FINISHED_ABORTED:
                    raise RequestError(
                        f"request id {request.request_id!r} is in use: read its answer, or choose another"
                    )
            self._answers |= {answer.request.request_id: answer for answer in answers}
            self._forget_unread()
        for answer in answers:
            if on_done is not None:
                answer.on_finish(_Done(self, answer, on_done))
            if answer.limit == 0:
                answer.finish(RequestStatus.FINISHED_LENGTH_CAPPED)
            try:
                worker.submit(answer)
            except EngineStopped as error:
                answer.finish(RequestStatus.FINISHED_ERROR, error)
        return answers

    def _answer(self, request_id: str) -> Answer:
        answer = self._answers.get(request_id)
        if answer is None:
            raise RequestError(f"there is no request {request_id!r}, or its output was read already")
        return answer

    def release(self, answer: Answer) -> None:
        """A consumer is done with an answer: abort what is still live, forget what is finished."""
        request_id = answer.request.request_id
        self.abort(request_id) if self._answers.get(request_id) is answer else None
        with self._lock:
            if self._answers.get(request_id) is answer:
                del self._answers[request_id]

    def _forget_unread(self) -> None:
        finished = [i for i, answer in self._answers.items() if answer.status.is_finished()]
        for request_id in finished[: max(0, len(finished) - UNREAD_KEPT)]:
            del self._answers[request_id]

    def _live(self) -> list[Answer]:
        with self._lock:
            return [answer for answer in self._answers.values() if not answer.status.is_finished()]

    # -- statistics and caches --------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """Counters, rates, memory (bytes) and one row per live request; cheap, from any thread."""
        worker, counters, now = self._worker, self._counters, time.monotonic()
        prompt_tps, generation_tps = counters.rates() if self.is_running() else (0.0, 0.0)
        with worker.admission if worker else contextlib.nullcontext():
            rows = [answer.describe(now) for answer in self._live()]
        rows = [row for row in rows if row["status"] in _LIVE]  # one may have ended since
        running = sum(row["phase"] != "waiting" for row in rows)
        memory = worker.memory if worker else None
        return {
            "engine_id": self.engine_id,
            "model_name": self.model_name,
            "state": self.state,
            "running": self.is_running(),
            "paused": self.paused,
            "loaded": worker is not None and worker.backend is not None,
            "uptime_seconds": now - counters.began,
            "steps_executed": counters.steps,
            "active_requests": len(rows),
            "num_waiting": len(rows) - running,
            "num_running": running,
            "max_running": self.config.scheduler_config.max_running,
            "num_requests_processed": counters.processed,
            "total_prompt_tokens": counters.prompt_total,
            "total_completion_tokens": counters.completion_total,
            "generation_tps": generation_tps,
            "prompt_tps": prompt_tps,
            **counters.measured(),
            "memory": {
                name: getattr(memory, name, 0)
                for name in ("active", "cache", "peak", "limit", "weights", "kv", "prefix")
            },
            "prefix_cache": self.get_cache_stats(),
            "requests": rows,
            **(worker.report if worker else {}),
        }

    def get_cache_stats(self) -> dict[str, float] | None:
        """Prefix cache counters, or None without a prefix cache."""
        stats = self._worker.cache_stats if self._worker else None
        return None if stats is None else stats.as_dict()

    def save_cache_to_disk(self, cache_dir: str | Path) -> bool:
        """Write the stored prefixes to a folder, atomically; False if there are none."""
        return not self._unloaded() and self._call(lambda backend: backend.save_cache(Path(cache_dir)))

    def load_cache_from_disk(self, cache_dir: str | Path) -> int:
        """Read prefixes that this very model saved; how many. CacheMismatchError for another model's."""
        return self._call(lambda backend: backend.load_cache(Path(cache_dir)))

    def clear_prefix_cache(self) -> None:
        """Forget the stored prefixes and give their memory back to the system."""
        if not self._unloaded():
            self._call(lambda backend: backend.clear_prefix_cache())

    def clear_prefix_cache_soon(self) -> None:
        """`clear_prefix_cache` without waiting for it."""
        with contextlib.suppress(EngineStopped, EngineNotStarted):
            if not self._unloaded():
                self._started().call(lambda backend: backend.clear_prefix_cache())

    def hold_prefix(self, tokens: list[int], *, held: bool = True) -> None:
        """Spare the stored prefix of exactly these tokens when others are evicted, or no longer. Returns at once.

        It may be stored later, by a request with this `prefix_boundary`. Each hold needs a release of its own.
        """
        with contextlib.suppress(EngineStopped, EngineNotStarted):
            if held or not self._unloaded():
                self._started().call(lambda backend: backend.hold_prefix(tokens, held=held))

    async def warm_up(self) -> None:
        """Compile what the first requests need, so that they don't wait for it (seconds to minutes on a GPU)."""
        await self.ready()
        future = self._started().call(lambda backend: backend.warm_up())
        await on_loop(lambda wake: future.add_done_callback(lambda _: wake()))
        future.result()

    def warm_up_now(self) -> None:
        """`warm_up` for a plain thread."""
        self._call(lambda backend: backend.warm_up())

    def clear_runtime_caches(self) -> dict[str, Any] | None:
        """Empty prefix cache and MLX's buffer pool; the bytes freed. None if the engine isn't running."""
        if self._unloaded():
            return {"prefix_cache_bytes": 0, "pool_bytes": 0}
        return self._call(lambda backend: backend.clear_runtime_caches()) if self.is_running() else None

    def _unloaded(self) -> bool:
        """Whether the model has left memory for want of requests: then there is nothing to save or clear."""
        worker = self._worker
        return worker is not None and worker.state == "running" and worker.backend is None

    def _call(self, action: Callable[[Backend], T]) -> T:
        self.wait_ready()
        return self._started().call(action).result()


class _Progress:
    """Passes loading's progress on, without keeping the engine alive."""

    def __init__(self, core: EngineCore) -> None:
        self._core = weakref.ref(core)

    def __call__(self, progress: LoadProgress) -> None:
        core = self._core()
        if core is not None:
            core.progress = progress
            if core._on_progress is not None:
                core._on_progress(progress)


class _Adopt:
    """Takes over what loading found out, without keeping the engine alive."""

    def __init__(self, core: EngineCore, worker: Worker) -> None:
        self._core, self._worker = weakref.ref(core), weakref.ref(worker)

    def __call__(self) -> None:
        core, worker = self._core(), self._worker()
        if core is not None and worker is not None and (backend := worker.backend) is not None:
            core._intake = Intake(
                core.engine_id,
                backend.codec,
                backend.info,
                backend.check,
                backend.footprint,
                backend.kv_budget,
            )


class _Done:
    """Hands a finished answer to its only consumer and forgets it."""

    def __init__(self, core: EngineCore, answer: Answer, on_done: Callable[[RequestOutput], None]) -> None:
        self._core, self._answer, self._on_done = weakref.ref(core), answer, on_done

    def __call__(self) -> None:
        core = self._core()
        if core is not None:
            core.release(self._answer)
        self._on_done(self._answer.final())


def _result(answer: Answer) -> RequestOutput:
    output = answer.final()
    if output.error is not None:
        raise output.error
    return output


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(
            f"sampling_params has {len(params)} entries for {count} prompts: give one, or one each"
        )
    return params


def _batch_backend(model: Any, tokenizer: Any) -> BackendFactory:
    """For a model that this thread hands over: a lazy array could not be evaluated on another."""
    from ..backends.loader import evaluate

    evaluate(model)

    def make(config: EngineConfig, _: Callable[[LoadProgress], None]) -> Backend:
        from ..backends.batch import BatchBackend

        return BatchBackend(model, tokenizer, config)

    return make
