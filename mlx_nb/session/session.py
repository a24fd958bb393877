"""Engines by name, the one in use, and prompts on their way to them.

There is one session a process, shared by magics, DataFrames and scripts. It touches neither notebooks nor arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..backends import cpu_blas, sources
from ..config import EngineConfig, SingleStream
from ..engine.async_core import AsyncEngineCore
from ..engine.core import EngineCore
from ..engine.intake import Prompt
from ..errors import EngineNotStarted, EngineStopped, MlxNbError, RequestError
from ..outputs import GenerationOutput, LoadProgress, RequestOutput
from ..prompts.chat import Message, chat_tokens, messages_for, shared_tokens
from ..remote import Remote
from ..request import Chat
from ..sampling import SamplingParams
from .media import NO_MEDIA, Media, apart, with_media
from .structured import read_structured

__all__ = [
    "NamedEngine",
    "Session",
    "current_engine",
    "default_session",
    "prefix_boundary_for",
    "prompt_for",
    "question_for",
    "system_boundary_for",
    "to_generation",
]

START_HINT = "no engine is running: start one with %mlx_engine start demo (or another model)"


class NamedEngine:
    """An engine of the session.

    Attributes
    ----------
    name : str
        What people call it.
    model : str
        The MODEL it was started with, or the URL of its server.
    handle : AsyncEngineCore
    remote : Remote, optional
        The server that it drives.
    """

    def __init__(self, name: str, model: str, handle: AsyncEngineCore, remote: Remote | None = None) -> None:
        self.name, self.model, self.handle, self.remote = name, model, handle, remote

    @property
    def again(self) -> str:
        """The command that makes another of its kind."""
        return f"%mlx_engine {'start' if self.remote is None else 'connect'} {self.model}"

    @property
    def core(self) -> EngineCore:
        """The engine itself."""
        return self.handle.engine

    def __repr__(self) -> str:
        return f"<engine {self.name!r}: {self.model}, {self.core.state}>"


class Session:
    """The engines of this process by name. The last one started or chosen is the current one."""

    def __init__(self) -> None:
        self._engines: dict[str, NamedEngine] = {}
        self._current: str | None = None

    @property
    def engines(self) -> dict[str, NamedEngine]:
        """All engines, by name (a copy)."""
        return dict(self._engines)

    @property
    def current(self) -> NamedEngine | None:
        """The engine that is used when none is named."""
        return self._engines.get(self._current) if self._current else None

    def start(
        self,
        model: str,
        *,
        name: str | None = None,
        config: EngineConfig | None = None,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
        blas_threads: int | None = None,
        single: SingleStream | None = None,
        distributed: bool = False,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> NamedEngine:
        """Launch an engine, which loads on its own thread, and make it the current one. Returns at once.

        An engine of this name that runs the same model is returned as it is; a stopped or failed one is replaced.

        Parameters
        ----------
        blas_threads : int, optional
            Threads of OpenBLAS on a CPU, for this process and so for all its engines.
        single : SingleStream, optional
            Run one request at a time, at the speed of a single stream.
        distributed : bool
            Divide the model among the processes that mlx.launch started with this one.

        Raises
        ------
        UnknownModelError
            For a name that is no model.
        MlxNbError
            When the name is taken by another model.
        """
        name = name or "default"
        known = self._engines.get(name)
        if known is not None and known.core.is_running():
            if _meant(known.model) != _meant(model):
                raise MlxNbError(
                    f"engine {name!r} runs {known.model}: stop it first (%mlx_engine stop), or choose another --name"
                )
            self._current = name
            return known
        handle = AsyncEngineCore.from_pretrained(
            model,
            config,
            adapter_path=adapter_path,
            trust_remote_code=trust_remote_code,
            single=single,
            distributed=distributed,
            on_progress=on_progress,
        )
        if blas_threads is not None:
            cpu_blas.set_threads(blas_threads)
        if known is not None:
            known.core.close()
        return self.adopt(name, model, handle)

    def connect(
        self,
        remote: Remote,
        *,
        name: str | None = None,
        config: EngineConfig | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> NamedEngine:
        """Launch an engine that drives a server, and make it the current one. Returns at once.

        An engine of this name that drives the same model of the same server is returned as it is.

        Raises
        ------
        RemoteError
            Without the openai package.
        MlxNbError
            When the name is taken by another engine.
        """
        name = name or "default"
        known = self._engines.get(name)
        if known is not None and known.core.is_running():
            if known.remote != remote:
                raise MlxNbError(
                    f"engine {name!r} runs {known.model}: stop it first (%mlx_engine stop), or choose another --name"
                )
            self._current = name
            return known
        handle = AsyncEngineCore.remote(remote, config, on_progress=on_progress)
        if known is not None:
            known.core.close()
        return self.adopt(name, remote.url, handle, remote)

    def adopt(
        self, name: str, model: str, handle: AsyncEngineCore, remote: Remote | None = None
    ) -> NamedEngine:
        """Take an engine in under a name, start it and make it the current one."""
        engine = NamedEngine(name, model, handle, remote)
        handle.start()
        self._engines[name] = engine
        self._current = name
        return engine

    def get(self, name: str | None = None) -> NamedEngine:
        """The engine of this name, or the current one; EngineNotStarted if there is none that runs."""
        if name is None:
            engine = self.current
            if engine is None:
                raise EngineNotStarted(START_HINT)
        else:
            found = self._engines.get(name)
            if found is None:
                known = ", ".join(sorted(self._engines)) or "none"
                raise EngineNotStarted(f"there is no engine {name!r} (running: {known})")
            engine = found
        if not engine.core.is_running():
            raise EngineNotStarted(_why_dead(engine))
        return engine

    def running(self, model: str) -> NamedEngine:
        """The engine that runs this model, the current one first; EngineNotStarted if there is none."""
        engines = [engine for engine in self._engines.values() if engine.core.is_running()]
        engines.sort(key=lambda engine: engine.name != self._current)
        for engine in engines:
            if model == engine.core.model_name or _meant(model) == _meant(engine.model):
                return engine
        known = ", ".join(sorted({engine.model for engine in engines})) or "none"
        raise EngineNotStarted(
            f"no engine runs the model {model!r} (running: {known}): start one with %mlx_engine start {model}"
        )

    def use(self, name: str) -> NamedEngine:
        """Make an engine the current one."""
        engine = self.find(name)
        self._current = name
        return engine

    def forget(self, name: str) -> NamedEngine:
        """Take an engine out of the session and tell it to stop; the caller may wait for its end."""
        engine = self._engines.pop(self.find(name).name)
        engine.core.stop_soon()
        if self._current == engine.name:
            self._current = next(reversed(self._engines), None)
        return engine

    def find(self, name: str | None = None) -> NamedEngine:
        """As `get`, but an engine that failed or stopped is found as well."""
        key = name or self._current
        if key is None:
            raise EngineNotStarted(START_HINT)
        if key not in self._engines:
            return self.get(key)
        return self._engines[key]

    def stop_all(self, timeout: float | None = None) -> None:
        """Stop and close every engine."""
        engines, self._engines, self._current = list(self._engines.values()), {}, None
        for engine in engines:
            engine.core.stop_soon()
        for engine in engines:
            engine.core.stop_now(timeout)
            engine.core.close()


def _meant(model: str) -> str:
    """What a MODEL stands for, to tell whether two are the same."""
    try:
        return sources.resolve(model).value
    except MlxNbError:
        return model


def _why_dead(engine: NamedEngine) -> str:
    """Why an engine takes no prompts, and how to have it back."""
    core = engine.core
    if isinstance(core.failure, EngineStopped):  # in a forked process
        return str(core.failure)
    if core.state == "closed":
        return f"engine {engine.name!r} is closed: start another with {engine.again}"
    why = f"failed ({core.failure})" if core.state == "failed" else "is stopped"
    return f"engine {engine.name!r} {why}: start it again with %mlx_engine restart {engine.name}"


@functools.cache
def default_session() -> Session:
    """The session that magics and DataFrames use."""
    return Session()


def current_engine(name: str | None = None) -> AsyncEngineCore:
    """The engine of this name, or the one in use; EngineNotStarted if there is none."""
    return default_session().get(name).handle


def question_for(
    engine: EngineCore,
    prompt: str | Sequence[Message],
    media: Media = NO_MEDIA,
    *,
    system: str | None = None,
    raw: bool = False,
) -> tuple[str | Sequence[Message], Media]:
    """What `prompt_for` takes for a question about images or videos, and all of those that it brings.

    Raises
    ------
    RequestError
        For a model that takes none, and for those that have no place in the prompt.
    """
    if isinstance(prompt, str):
        if not media:
            return prompt, media
        if raw:
            raise RequestError("images and videos act through the chat template: leave them out, or raw")
        prompt = messages_for(prompt, system)
    messages, media = apart(with_media(prompt, media))
    media.check(engine)
    return messages, media


def prompt_for(
    engine: EngineCore,
    prompt: str | Sequence[Message],
    *,
    system: str | None = None,
    raw: bool = False,
    thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> Prompt:
    """What to submit for a question or a conversation.

    Its tokens by the model's chat template, or with `raw` the text as it is. A server gets the messages.
    """
    if isinstance(prompt, str):
        if raw:
            return prompt
        prompt = messages_for(prompt, system)
    if engine.info.remote:
        return Chat(tuple(prompt))
    return chat_tokens(engine.codec, prompt, tools=tools, thinking=thinking)


def prefix_boundary_for(
    engine: EngineCore,
    prompt: str | Sequence[Message],
    tokens: Prompt,
    *,
    system: str | None = None,
    thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> int:
    """Where the prefix cache should checkpoint what `prompt_for` gave: before the last message."""
    if not isinstance(tokens, list):
        return 0
    messages = messages_for(prompt, system) if isinstance(prompt, str) else prompt
    return shared_tokens(engine.codec, messages, tokens, tools=tools, thinking=thinking)


def system_boundary_for(
    engine: EngineCore,
    messages: Sequence[Message],
    tokens: Prompt,
    *,
    thinking: bool | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
) -> int:
    """Where what `prompt_for` gave stops being the system prompt's: what conversations have in common."""
    first = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if not isinstance(tokens, list) or first == len(messages):
        return 0
    question = messages[first]
    if not isinstance(question.get("content"), str):  # its pictures are no part of what conversations share
        question = {**question, "content": ""}
    said = [*messages[:first], question]
    return shared_tokens(engine.codec, said, tokens, tools=tools, thinking=thinking)


def to_generation(output: RequestOutput, params: SamplingParams | None = None) -> GenerationOutput:
    """An engine's output as the notebook gives it.

    With structured output, `parsed` is the value: of a schema the JSON, or an instance of the Pydantic model;
    else the text. An answer that was cut off has none; one that is complete at max_tokens ends with "stop".
    """
    answer = None
    if params is not None and params.constraint is not None:
        answer = read_structured(output.output_text, output.finish_reason, params)
    complete = answer is not None and answer.complete
    return GenerationOutput(
        text=output.output_text,
        tokens=output.output_token_ids,
        prompt_tokens=output.prompt_tokens,
        completion_tokens=output.completion_tokens,
        finish_reason="stop" if complete else output.finish_reason,
        new_text=output.new_text,
        finished=output.finished,
        reasoning=output.reasoning,
        tool_calls=output.tool_calls,
        parsed=answer.value if answer is not None else None,
        mtp_drafts=output.mtp_drafts,
        mtp_accepted=output.mtp_accepted,
        cached_tokens=output.cached_tokens,
        logprobs=output.logprobs,
        timings=output.timings,
    )
