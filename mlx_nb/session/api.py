"""Starting, asking and chatting from Python: in scripts, in functions, and in cells that await nothing.

The blocking functions wait for the engine's own thread and touch no event loop, so they work in a live kernel as
well; `agenerate` and `achat` are awaited. Questions go through the model's chat template.
"""

from __future__ import annotations

import asyncio
import difflib
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, overload

from ..config import EngineConfig, SchedulerConfig
from ..engine.async_core import AsyncEngineCore
from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..engine.interrupts import interruptible
from ..errors import EngineNotStarted, RequestError
from ..outputs import GenerationOutput, LoadProgress, RequestOutput
from ..prompts.chat import Message
from ..remote import Remote, ServerKind
from ..sampling import SamplingParams
from .conversation import Conversation
from .conversation import conversation as conversation_named
from .keys import find_key
from .media import NO_MEDIA, Media, as_text, length, taken_in
from .session import (
    NamedEngine,
    default_session,
    prefix_boundary_for,
    prompt_for,
    question_for,
    to_generation,
)
from .tools import Tool

__all__ = ["achat", "agenerate", "chat", "config_of", "connect", "count_tokens", "generate", "start", "stop"]

Question = str | Sequence[Message]
"""A text, or messages as ``{"role": "user", "content": "…"}``."""

Engine = str | AsyncEngineCore | EngineCore
"""An engine's name, or an engine."""

ToolLike = Callable[..., Any] | Mapping[str, Any]
"""A Python function, or the schema of one."""


def start(
    model: str | Path,
    *,
    name: str | None = None,
    config: EngineConfig | None = None,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    blas_threads: int | None = None,
    distributed: bool = False,
    on_progress: Callable[[LoadProgress], None] | None = None,
    **options: Any,
) -> AsyncEngineCore:
    """Load a model, make its engine the current one, and return it once it is ready.

    Parameters
    ----------
    model : str or Path
        "demo", a Hub id, a folder, a ``.gguf`` file or an alias.
    name : str, optional
        What to call the engine; several run side by side. An engine of this name that runs the same model is
        returned as it is.
    config : EngineConfig, optional
    adapter_path : str or Path, optional
        Folder of a LoRA adapter.
    blas_threads : int, optional
        Threads of OpenBLAS on a CPU, for this process and so for all its engines.
    distributed : bool
        Divide the model among the processes that mlx.launch started with this one: see `follow`.
    on_progress : callable, optional
        Gets `LoadProgress` on the engine's thread.
    **options
        Fields of `EngineConfig` and `SchedulerConfig`, in place of those in `config`.

    Raises
    ------
    ModelLoadError, ValueError
        No engine is left behind.
    """
    session = default_session()
    before = session.current
    engine = session.start(
        str(model),
        name=name,
        config=config_of(config, options),
        adapter_path=adapter_path,
        trust_remote_code=trust_remote_code,
        blas_threads=blas_threads,
        distributed=distributed,
        on_progress=on_progress,
    )
    return _ready(engine, before)


def connect(
    url: str,
    *,
    model: str | None = None,
    name: str | None = None,
    server: ServerKind | None = None,
    concurrency: int = 16,
    timeout_s: float = 300.0,
    patience_s: float = 120.0,
    key_env: str | None = None,
    ask_key: bool = False,
    config: EngineConfig | None = None,
) -> AsyncEngineCore:
    """Drive a server of OpenAI's API as an engine, make it the current one, and return it once it answers.

    Needs the extra ``remote``. mlx_lm.server, vllm-mlx and vLLM are known; of others only what the API has is used.

    Parameters
    ----------
    url : str
        ``http://localhost:8080``; without a path "/v1" is added.
    model : str, optional
        As the server calls it; None takes the only one it has.
    name : str, optional
        What to call the engine.
    server : {"openai", "vllm", "vllm-mlx", "mlx-lm"}, optional
        What it is, if it doesn't say.
    concurrency : int
        Most requests that it has at once.
    timeout_s : float
        Seconds without any sign of life in an answer, after which the connection counts as lost.
    patience_s : float
        Seconds that a request is tried again when the server can't be reached, is too busy or fails.
    key_env : str, optional
        The environment variable that holds the key; OPENAI_API_KEY by itself for https and for this machine.
    ask_key : bool
        Ask for the key, without an echo.

    Raises
    ------
    RemoteError, ModelLoadError, ValueError
        No engine is left behind.
    """
    remote = Remote(url, model, server, concurrency, timeout_s, patience_s)
    remote = replace(remote, key=find_key(remote.url, key_env, ask=ask_key))
    session = default_session()
    before = session.current
    return _ready(session.connect(remote, name=name, config=config), before)


def _ready(engine: NamedEngine, before: NamedEngine | None) -> AsyncEngineCore:
    """The engine once it is loaded; without a trace if it doesn't load."""
    try:
        with interruptible():
            engine.core.wait_ready()
    except BaseException:
        _give_up(engine, before)
        raise
    return engine.handle


def stop(name: str | None = None) -> None:
    """Stop the engine of this name, or the current one, and free its memory."""
    session = default_session()
    if name is None and session.current is None:
        raise _not_started()
    core = session.forget(session.find(name).name).core
    with interruptible():
        core.stop_now()
    core.close()


@overload
def generate(
    prompt: Question, params: SamplingParams | None = ..., *, n: None = ..., **options: Any
) -> GenerationOutput: ...
@overload
def generate(
    prompt: Question, params: SamplingParams | None = ..., *, n: int, **options: Any
) -> list[GenerationOutput]: ...
def generate(
    prompt: Question,
    params: SamplingParams | None = None,
    *,
    n: int | None = None,
    engine: Engine | None = None,
    system: str | None = None,
    raw: bool = False,
    images: Any = None,
    videos: Any = None,
    tools: Sequence[ToolLike] | None = None,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Any,
) -> GenerationOutput | list[GenerationOutput]:
    """Answer a prompt, blocking.

    Parameters
    ----------
    prompt : str or sequence of messages
        A text, or messages as ``{"role": "user", "content": "…"}``.
    params : SamplingParams, optional
    n : int, optional
        Gives a list of that many answers. With a seed, the later ones take the seeds after it.
    engine : str or engine, optional
        The current one if None.
    system : str, optional
        What the model is told before the prompt.
    raw : bool
        Give a text to the model as it is, without chat template.
    images, videos : optional
        One or a list of them: paths, URLs, bytes, arrays, figures or PIL images; frames of one video are a list in
        the list. They stand before the text, or in parts of messages: ``{"type": "image"}``.
    tools : sequence of callable or dict, optional
        What the model may call: Python functions, described by their annotations and docstrings, or schemas. Its
        calls come back in `tool_calls`; nothing is called.
    priority : int
        Lower goes first under the "priority" policy.
    timeout : float, optional
        Seconds after which TimeoutError is raised.
    **sampling
        Fields of `SamplingParams`, in place of those in `params`: ``max_tokens=60, temperature=0, schema=…``.

    Raises
    ------
    RequestError, ValueError
        What can't be asked, in one line.
    EngineNotStarted, EngineStopped
    """
    core, media = _core(engine), Media.of(images, videos)
    asked = _Asked(core, prompt, _params(params, sampling), n, system, raw, tools, media, priority, timeout)
    with interruptible():
        core.wait_ready()
        return asked.result(_answers(core, asked.requests()))


@overload
async def agenerate(
    prompt: Question, params: SamplingParams | None = ..., *, n: None = ..., **options: Any
) -> GenerationOutput: ...
@overload
async def agenerate(
    prompt: Question, params: SamplingParams | None = ..., *, n: int, **options: Any
) -> list[GenerationOutput]: ...
async def agenerate(
    prompt: Question,
    params: SamplingParams | None = None,
    *,
    n: int | None = None,
    engine: Engine | None = None,
    system: str | None = None,
    raw: bool = False,
    images: Any = None,
    videos: Any = None,
    tools: Sequence[ToolLike] | None = None,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Any,
) -> GenerationOutput | list[GenerationOutput]:
    """`generate`, awaited. Cancelling it ends the request."""
    core, media = _core(engine), await taken_in(images, videos)
    asked = _Asked(core, prompt, _params(params, sampling), n, system, raw, tools, media, priority, timeout)
    await core.ready()
    return asked.result(await _answers_awaited(core, asked.requests()))


def chat(
    question: str,
    conversation: str | Conversation = "default",
    params: SamplingParams | None = None,
    *,
    engine: Engine | None = None,
    system: str | None = None,
    images: Any = None,
    videos: Any = None,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Any,
) -> GenerationOutput:
    """Ask the next question of a conversation, blocking.

    The turn becomes part of it when the answer is complete. Turns that the context has no room for are left out,
    oldest first; `turns_left_out` of the result says how many.

    Parameters
    ----------
    question : str
    conversation : str or Conversation
        A name, as of ``%%mlx_chat``, or a conversation of your own.
    system : str, optional
        From now on the conversation's system message.
    images, videos : optional
        What the question is about, as of `generate`. They stay with the turn: later ones are asked with them.
    params, engine, priority, timeout, **sampling
        As of `generate`.
    """
    core, media = _core(engine), Media.of(images, videos)
    turn = _Turn(core, question, conversation, _params(params, sampling), system, media, priority, timeout)
    with interruptible():
        turn.core.wait_ready()
        (output,) = _answers(turn.core, [turn.request()])
    return turn.result(output)


async def achat(
    question: str,
    conversation: str | Conversation = "default",
    params: SamplingParams | None = None,
    *,
    engine: Engine | None = None,
    system: str | None = None,
    images: Any = None,
    videos: Any = None,
    priority: int = 0,
    timeout: float | None = None,
    **sampling: Any,
) -> GenerationOutput:
    """`chat`, awaited. Cancelling it ends the request and leaves the conversation as it was."""
    core, media = _core(engine), await taken_in(images, videos)
    turn = _Turn(core, question, conversation, _params(params, sampling), system, media, priority, timeout)
    await turn.core.ready()
    (output,) = await _answers_awaited(turn.core, [turn.request()])
    return turn.result(output)


def count_tokens(
    prompt: Question,
    *,
    engine: Engine | None = None,
    system: str | None = None,
    raw: bool = False,
    images: Any = None,
    videos: Any = None,
    tools: Sequence[ToolLike] | None = None,
    thinking: bool | None = None,
) -> int:
    """How many tokens the model would read for this prompt.

    Those of the chat template are among them unless it is `raw`, and those of its images and videos.
    """
    core, media = _core(engine), Media.of(images, videos)
    asked = _Asked(core, prompt, SamplingParams(thinking=thinking), None, system, raw, tools, media)
    with interruptible():
        core.wait_ready()
    return asked.length()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `generate` is asked, checked as far as that goes without the model."""

    core: EngineCore
    prompt: Question
    params: SamplingParams
    n: int | None
    system: str | None
    raw: bool
    tools: Sequence[ToolLike] | None
    media: Media = NO_MEDIA
    priority: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.n is not None and (not isinstance(self.n, int) or self.n < 1):
            raise RequestError(f"n is a number of answers, 1 or more, got {self.n!r}")
        if isinstance(self.prompt, str):
            if not self.prompt.strip():
                raise RequestError("the prompt is empty: give it a text")
            if self.raw and (self.system or self.tools or self.params.thinking is not None):
                raise RequestError(
                    "system, tools and thinking act through the chat template: leave them out, or raw"
                )
        elif not are_messages(self.prompt):
            raise RequestError('a prompt is a text, or messages such as {"role": "user", "content": "Hello"}')
        elif self.raw or self.system is not None:
            raise RequestError("raw and system go with a text: put a system message among the messages")

    def length(self) -> int:
        """Tokens that the model reads."""
        tokens, _, media = self._read()
        return length(self.core, tokens, media)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Arguments of `EngineCore.submit`, one for each answer."""
        tokens, boundary, media = self._read()
        last = self.prompt if isinstance(self.prompt, str) else as_text(self.prompt[-1].get("content"))
        for number in range(self.n or 1):
            seed = self.params.seed
            yield {
                "prompt": tokens,
                "sampling_params": self.params
                if seed is None
                else self.params.but(seed=(seed + number) % 2**64),
                "prefix_boundary": boundary,
                "tools": self._tools(),
                "priority": self.priority,
                "timeout": self.timeout,
                "preview": last,
                **media.options(),
            }

    def _read(self) -> tuple[Prompt, int, Media]:
        """The prompt for the engine, where later ones may begin to differ, and what goes with it."""
        prompt, media = question_for(self.core, self.prompt, self.media, system=self.system, raw=self.raw)
        options: dict[str, Any] = {
            "system": self.system,
            "thinking": self.params.thinking,
            "tools": self._tools(),
        }
        tokens = prompt_for(self.core, prompt, raw=self.raw, **options)
        return tokens, 0 if media else prefix_boundary_for(self.core, prompt, tokens, **options), media

    def result(self, outputs: Sequence[RequestOutput]) -> GenerationOutput | list[GenerationOutput]:
        """One answer, or several."""
        answers = [to_generation(output, self.params) for output in outputs]
        return answers[0] if self.n is None else answers

    def _tools(self) -> list[dict[str, Any]] | None:
        if not self.tools:
            return None
        return [dict(tool) if isinstance(tool, Mapping) else Tool(tool).schema for tool in self.tools]


class _Turn:
    """What `chat` is asked."""

    def __init__(
        self,
        core: EngineCore,
        question: str,
        conversation: str | Conversation,
        params: SamplingParams,
        system: str | None,
        media: Media,
        priority: int,
        timeout: float | None,
    ) -> None:
        if not isinstance(question, str) or not question.strip():
            raise RequestError("a question is a text that isn't empty; messages go to generate")
        if not isinstance(conversation, str | Conversation):
            raise RequestError(f"a conversation is a name or a Conversation, got {conversation!r}")
        self.core = core
        self._question, self._params, self._media = question, params, media
        self._options = {"priority": priority, "timeout": timeout, "preview": question}
        self._conversation = (
            conversation_named(conversation) if isinstance(conversation, str) else conversation
        )
        if system is not None:
            self._conversation.system = system or None
        self._left_out = 0

    def request(self) -> dict[str, Any]:
        """Arguments of `EngineCore.submit`."""
        fitted = self._conversation.fit(
            self.core,
            self._question,
            max_tokens=self._params.max_tokens,
            thinking=self._params.thinking,
            media=self._media,
        )
        self._left_out = fitted.left_out
        return {
            "prompt": fitted.tokens,
            "sampling_params": self._params,
            "prefix_boundary": fitted.prefix_boundary,
            **fitted.media.options(),
            **self._options,
        }

    def result(self, output: RequestOutput) -> GenerationOutput:
        """The answer, which now belongs to the conversation."""
        self._conversation.add(self._question, output.output_text, self._media)
        return replace(to_generation(output, self._params), turns_left_out=self._left_out)


def _answers(core: EngineCore, requests: Iterable[dict[str, Any]]) -> list[RequestOutput]:
    """Submit, block until all are done, and return them in order; whatever goes wrong ends them all."""
    done: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    ids: list[str] = []
    outputs: dict[str, RequestOutput] = {}
    try:
        ids.extend(core.submit(**request, on_done=done.put) for request in requests)
        while len(outputs) < len(ids):
            output = done.get()
            if output.error is not None:
                raise output.error
            outputs[output.request_id] = output
    finally:
        for request_id in ids:
            core.abort(request_id)
    return [outputs[request_id] for request_id in ids]


async def _answers_awaited(core: EngineCore, requests: Iterable[dict[str, Any]]) -> list[RequestOutput]:
    """`_answers`, awaited."""
    tasks = [asyncio.ensure_future(core.generate(**request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _core(engine: Engine | None) -> EngineCore:
    if isinstance(engine, AsyncEngineCore):
        return engine.engine
    if isinstance(engine, EngineCore):
        return engine
    if engine is None and default_session().current is None:
        raise _not_started()
    return default_session().get(engine).core


def _not_started() -> EngineNotStarted:
    return EngineNotStarted('no engine is running: start one with mlx_nb.start("demo") (or another model)')


def _params(params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    return (params or SamplingParams()).but(**sampling)


def are_messages(prompt: object) -> bool:
    """Whether it is a conversation."""
    return (
        isinstance(prompt, Sequence)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def config_of(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig | None:
    """A configuration with fields of it, and of its SchedulerConfig, in place of those it has."""
    if not options:
        return config
    config = config or EngineConfig()
    of_engine, of_scheduler = ({f.name for f in fields(kind)} for kind in (EngineConfig, SchedulerConfig))
    for name in options:
        if name not in of_engine | of_scheduler:
            close = difflib.get_close_matches(name, of_engine | of_scheduler, n=1)
            hint = f"did you mean {close[0]}?" if close else "see EngineConfig and SchedulerConfig"
            raise RequestError(f"unknown option {name!r} of an engine: {hint}")
    config = replace(config, **{name: value for name, value in options.items() if name in of_engine})
    scheduler = {name: value for name, value in options.items() if name in of_scheduler}
    return replace(config, scheduler_config=replace(config.scheduler_config, **scheduler))


def _give_up(engine: NamedEngine, before: NamedEngine | None) -> None:
    """Leave no trace of an engine that didn't load."""
    session = default_session()
    if session.engines.get(engine.name) is engine:
        session.forget(engine.name)
    if before is not None and before.name in session.engines:
        session.use(before.name)
