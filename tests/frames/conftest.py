"""Engines without a model, adopted by the session that DataFrames use."""

from collections.abc import Callable, Iterator

import pytest

import mlx_nb.frames.accessor  # noqa: F401 - registers
from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends.base import BackendFactory
from mlx_nb.backends.fake import fake_backend, text_tokens
from mlx_nb.request import Request
from mlx_nb.session.session import Session, default_session

Adopt = Callable[..., EngineCore]


def prompt_of(request: Request) -> str:
    """Return the text of a request's prompt."""
    return bytes(request.prompt_token_ids).decode()


def question_of(request: Request) -> str:
    """Return the text of a request's question, without the chat template."""
    return prompt_of(request).rpartition("user: ")[2].removesuffix("\nassistant: ")


def repeat(request: Request) -> list[int]:
    """Answer with the question."""
    return text_tokens(question_of(request))


def shout(request: Request) -> list[int]:
    """Answer the last line of the question in capitals; fail where it says "fail"."""
    question = question_of(request)
    if "fail" in question:
        raise RuntimeError("the script failed")
    return text_tokens(question.upper())


def _lenient(make: BackendFactory) -> BackendFactory:
    def made(config, on_progress):
        backend = make(config, on_progress)
        backend.check = lambda request: None
        return backend

    return made


@pytest.fixture
def session() -> Iterator[Session]:
    """Return the session, empty before and after."""
    session = default_session()
    session.stop_all()
    yield session
    session.stop_all()


@pytest.fixture
def adopt(session: Session) -> Adopt:
    """Return a function that starts a fake engine: `adopt(script, name=…, batch=…, structured=…, step_s=…)`.

    With `structured` it takes schemas and choices, and it's for the script to keep to them.
    """

    def start(
        script=shout, *, name="default", model="fake", batch=4, prefixes=False, structured=False, **options
    ) -> EngineCore:
        config = EngineConfig(
            scheduler_config=SchedulerConfig(completion_batch_size=batch, enable_prefix_cache=prefixes)
        )
        backend = fake_backend(script, **options)
        core = EngineCore(None, None, config, backend=_lenient(backend) if structured else backend)
        session.adopt(name, model, AsyncEngineCore.over(core))
        return core

    return start


@pytest.fixture
def engine(adopt: Adopt) -> EngineCore:
    """Return an engine that shouts."""
    return adopt()
