"""A backend that is a server of OpenAI's API: mlx_lm.server, vllm-mlx, vLLM and their like.

Requests run on an event loop in a thread of its own, each as a stream, and what comes is handed to the engine thread,
which waits for it in `next`. The engine admits as many at a time as it would run rows. A request that the server
can't take now is asked again, ever more seldom, for as long as `Remote.patience_s`; one of which something has been
read already is not, or it would be read twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

from ..config import EngineConfig
from ..errors import ModelLoadError, RemoteError, RequestError
from ..footprint import KVFootprint
from ..outputs import LoadProgress
from ..remote import Remote
from ..request import Chat, Request
from .base import BackendFactory, CacheStats, Ended, Event, Fault, Memory, ModelInfo, Text
from .remote_errors import Cut, Trouble, pause, trouble_of
from .remote_servers import PYTHONS, SERVERS, Server, as_sent, kind_of
from .remote_stream import read

__all__ = ["RemoteBackend", "remote_backend"]

STEP_S = 0.1
"""Seconds that a step waits at most for something to come: how late a request's deadline may be noticed."""
CONNECT_S = 10.0
LIST_S = 30.0
"""Seconds that a server may take to list its models."""
LISTED = 12
"""Models that an error names."""

T = TypeVar("T")


def remote_backend(remote: Remote) -> BackendFactory:
    """A factory for ``EngineCore(None, None, backend=…)``; RemoteError without the openai package."""
    try:
        import openai  # noqa: F401 - only whether it is there
    except ImportError:
        raise RemoteError(
            "connecting to servers needs the openai package: pip install 'mlx-nb[remote]'"
        ) from None

    def make(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> RemoteBackend:
        return RemoteBackend(remote, config, on_progress)

    return make


class RemoteCodec:
    """Stands where a model's codec would: the tokenizer is the server's, so all that needs one is refused."""

    eos_token_ids: frozenset[int] = frozenset()
    vocabulary_size = 0
    image_place = video_place = ""

    def __init__(self, server: Server) -> None:
        self.chat_tokenizer = SimpleNamespace(has_thinking=server.thinking != "no")

    def _refuse(self, *_: Any) -> NoReturn:
        raise RequestError("the tokenizer is the server's: this needs an engine of this process")

    encode = decode = image_places = read_media = splitter = tool_calls = detokenizer = _refuse


class _Row:
    """A request with the server."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.task: concurrent.futures.Future[None] | None = None
        self.told = 0
        """Tokens that the engine knows of."""
        self.shown = False
        """Whether any text was handed on."""


class RemoteBackend:
    """See `base.Backend`. Made by `remote_backend`."""

    footprint = KVFootprint()
    kv_budget: int | None = None

    def __init__(
        self, remote: Remote, config: EngineConfig, on_progress: Callable[[LoadProgress], None]
    ) -> None:
        self._remote = remote
        self._rows: dict[str, _Row] = {}
        self._inbox: queue.SimpleQueue[tuple[_Row, Event] | None] = queue.SimpleQueue()
        self._retries = 0
        self._waiting: dict[str, str] = {}
        self._failing_since: float | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mlx-remote", daemon=True)
        self._thread.start()
        self._client: Any = None
        try:
            self._client = self._call(self._make_client())
            on_progress(LoadProgress("resolve", "asking for its models"))
            models, software = self._call(
                self._list(), lambda: on_progress(LoadProgress("resolve", "waiting for its models"))
            )
            self._server = SERVERS[remote.server] if remote.server else kind_of(models, software)
            self._model = _chosen(remote, models, self._server)
        except BaseException:
            self.close()
            raise
        self.check = self._server.check
        self.codec: Any = RemoteCodec(self._server)
        self.info = _described(remote, config, self._server, self._model, models)
        on_progress(LoadProgress("ready", "connected", 1.0))

    # -- the engine thread ------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """The server sees to that."""

    def insert(self, request: Request, made: Sequence[int] = ()) -> None:  # noqa: ARG002 - a row is never preempted
        """Send a request."""
        row = self._rows[request.request_id] = _Row(request)
        row.task = asyncio.run_coroutine_threadsafe(self._run(row), self._loop)

    def reserve(self, kv_bytes: int) -> None:
        """Memory is the server's concern."""

    def hold_prefix(self, tokens: Sequence[int], *, held: bool) -> None:
        """So are prefixes."""

    def remove(self, request_ids: Sequence[str], *, keep: bool) -> None:  # noqa: ARG002
        """Let go of requests: their connections close, so that the server ends its work too."""
        for request_id in request_ids:
            if (row := self._rows.pop(request_id, None)) is not None and row.task is not None:
                row.task.cancel()
        if not self._rows:
            self._failing_since = None

    def next(self) -> list[Event]:
        """What has come, or comes soon."""
        came: list[tuple[_Row, Event] | None] = []
        with contextlib.suppress(queue.Empty):
            came.append(self._inbox.get(timeout=STEP_S))
            while True:
                came.append(self._inbox.get_nowait())
        events: list[Event] = []
        for item in came:
            # What is late may be of a former request by the same id.
            if item is not None and self._rows.get(item[1].request_id) is item[0]:
                events.append(item[1])
                if isinstance(item[1], Fault):
                    self.remove([item[1].request_id], keep=False)
        return events

    def wake(self) -> None:
        """End `next` early."""
        self._inbox.put(None)

    def reset(self) -> list[str]:
        """Drop all requests; none is another's fault."""
        spared = list(self._rows)
        self.remove(spared, keep=False)
        return spared

    def memory(self) -> Memory:
        """Nothing of it is here."""
        return Memory()

    def report(self) -> dict[str, dict[str, Any]]:
        """The server, how often it was asked again, and what requests wait for now."""
        return {
            "remote": {
                "url": self._remote.url,
                "server": self._server.name,
                "model": self._model,
                "retries": self._retries,
                "waiting": len(self._waiting),
                "problem": next(iter(list(self._waiting.values())), None),
            }
        }

    def cache_stats(self) -> CacheStats | None:
        """None: the server keeps its own."""
        return None

    def clear_prefix_cache(self) -> None:
        """The server keeps its own."""

    def clear_runtime_caches(self) -> dict[str, Any]:
        """Nothing is here to be freed."""
        return {"prefix_cache_bytes": 0, "pool_bytes": 0}

    def save_cache(self, folder: Path) -> bool:  # noqa: ARG002
        """Nothing is here to be written."""
        return False

    def load_cache(self, folder: Path) -> int:  # noqa: ARG002
        """Refused."""
        raise RequestError("the server keeps its own prefix cache: there is nothing to load it into")

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(Exception):
            self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        """Have something done on the loop; `meanwhile` may raise to give it up."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            try:
                return future.result(STEP_S)
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
                try:
                    if meanwhile is not None:
                        meanwhile()
                except BaseException:
                    future.cancel()
                    raise

    # -- the loop ---------------------------------------------------------------------------------------

    async def _make_client(self) -> Any:
        import openai

        remote = self._remote
        try:
            client = openai.AsyncOpenAI(
                api_key="none" if remote.key is None else remote.key.reveal(),
                base_url=remote.url,
                max_retries=0,  # we do that, within the bounds of `patience_s`
                timeout=openai.Timeout(remote.timeout_s, connect=min(CONNECT_S, remote.timeout_s)),
            )
        except Exception:
            client = None
        if client is None:
            raise RemoteError(f"{remote.url} is no address of a server: correct the URL")
        if remote.key is None or remote.key.source != "OPENAI_API_KEY":
            client.organization = client.project = None  # the environment's, which belong to its key
        return client

    async def _list(self) -> tuple[list[Mapping[str, Any]], str]:
        """The server's models, and what it says it is."""
        trouble: Trouble
        try:
            timeout = min(LIST_S, self._remote.timeout_s)
            response = (await self._client.models.with_raw_response.list(timeout=timeout)).http_response
            software = response.headers.get("server", "")
            return _listed(response.text, software), software
        except Exception as error:
            if getattr(error, "status_code", None) in (404, 405) and self._remote.model is not None:
                return [], ""  # it lists none, and we know what to ask for
            trouble = trouble_of(error, self._remote.url, self._remote.key)
        raise trouble.error

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _run(self, row: _Row) -> None:
        """Have a request answered, patiently."""
        since: float | None = None
        for attempt in itertools.count():
            trouble: Trouble
            try:
                await self._ask(row)
                return
            except Exception as error:
                trouble = trouble_of(error, self._remote.url, self._remote.key)
            finally:
                self._waiting.pop(row.request.request_id, None)
            now = time.monotonic()
            since = since or now
            if trouble.passes:
                self._failing_since = self._failing_since or now
            wait = max(pause(attempt), trouble.wait_s or 0.0)
            over = row.shown or not trouble.passes or attempt + 1 == trouble.tries
            if over or not self._is_patient(since, now + wait):
                self._put(row, Fault(row.request.request_id, _given_up(trouble, row, now - since)))
                return
            self._retries += 1
            self._waiting[row.request.request_id] = str(trouble.error)
            await asyncio.sleep(wait)

    def _is_patient(self, since: float, until: float) -> bool:
        """Whether a request that fails `since`, as all do perhaps for longer, may wait `until` it is asked again."""
        began = min(since, self._failing_since or since)
        return until - began <= self._remote.patience_s

    async def _ask(self, row: _Row) -> None:
        """Send a request and pass on what comes."""
        request = row.request
        body = self._server.body(request)
        if isinstance(chat := request.asked, Chat):
            messages = await asyncio.to_thread(lambda: [*map(as_sent, chat.messages)])
            stream = await self._client.chat.completions.create(
                model=self._model, messages=messages, stream=True, extra_body=body
            )
        else:
            stream = await self._client.completions.create(
                model=self._model, prompt=chat, stream=True, extra_body=body
            )
        async with stream:
            kind = stream.response.headers.get("content-type", "")
            if "event-stream" not in kind:
                raise RemoteError(
                    f"{self._remote.url} answers with {kind or 'something'}: is it the right URL?"
                )
            self._failing_since = None
            texts: list[Text] = []
            made = 0
            async for event in _steadily(read(stream, request.request_id)):
                if isinstance(event, Ended):
                    if texts:
                        self._put(row, _joined(texts))
                    self._put(row, event)
                    return
                if not request.whole:
                    row.shown = True
                    self._put(row, event)
                    continue
                texts.append(event)
                made += event.tokens
                if made > row.told:  # else it was counted when it was written for the first time
                    self._put(row, Text(request.request_id, tokens=made - row.told))
                    row.told = made

    def _put(self, row: _Row, event: Event) -> None:
        self._inbox.put((row, event))


async def _steadily(events: AsyncIterator[Text | Ended]) -> AsyncIterator[Text | Ended]:
    """The events; whatever breaks the connection under them is a `Cut`."""
    import openai

    try:
        async for event in events:
            yield event
    except openai.APITimeoutError:
        raise
    except Exception as error:
        # Older releases of the client pass on what its HTTP library raises.
        transport = type(error).__module__.startswith("httpx")
        if transport or isinstance(error, openai.APIConnectionError | OSError):
            raise Cut from None
        raise


def _joined(texts: list[Text]) -> Text:
    """One text of all, whose tokens are counted already."""
    answer, reasoning = "".join(text.answer for text in texts), "".join(text.reasoning for text in texts)
    return Text(texts[0].request_id, answer, reasoning)


def _given_up(trouble: Trouble, row: _Row, seconds: float) -> Exception:
    """The error of a request that isn't asked again."""
    if row.shown and trouble.passes:
        return RemoteError(f"{trouble.error}: ask again for all of it")
    if trouble.passes and seconds >= 1:
        return RemoteError(f"{trouble.error} (tried for {seconds:.0f} s)")
    return trouble.error


def _listed(text: str, software: str) -> list[Mapping[str, Any]]:
    """The models in a server's list."""
    if not text and software.startswith(PYTHONS):
        return []  # mlx_lm.server without a Hugging Face cache to look through
    models = json.loads(text)["data"]
    return [model for model in models if isinstance(model["id"], str)]


def _chosen(remote: Remote, models: Sequence[Mapping[str, Any]], server: Server) -> str:
    """The model to ask; RemoteError if that isn't clear."""
    names = [str(model["id"]) for model in models]
    own = "default_model" if server.name == "mlx-lm" else None
    """What mlx_lm.server calls the one it was started with."""
    wanted = remote.model
    if wanted is not None and (wanted in names or wanted == own or not names):
        return wanted
    listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    if wanted is not None:
        raise ModelLoadError(f"{remote.url} has no model {wanted!r}: it has {listed}")
    if len(names) == 1:
        return names[0]
    if not names and own:
        return own
    if not names:
        raise ModelLoadError(f"{remote.url} lists no models: name one with --model")
    hint = f" (or {own}, the one it was started with)" if own else ""
    raise ModelLoadError(f"{remote.url} has {len(names)} models: choose one with --model: {listed}{hint}")


def _described(
    remote: Remote, config: EngineConfig, server: Server, model: str, models: Sequence[Mapping[str, Any]]
) -> ModelInfo:
    listed = next((each for each in models if each["id"] == model), {})
    context = listed.get("max_model_len")
    return ModelInfo(
        name=config.model_name or _short(model),
        backend=f"{remote.url} ({server.name})",
        context_length=context if isinstance(context, int) else None,
        fingerprint=f"{remote.url} {model}",
        takes_images=True,  # the server says so if its model doesn't
        remote=True,
    )


def _short(model: str) -> str:
    """A folder's name, for a server that names its model by a path."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith("/") else model
