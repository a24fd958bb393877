"""Engines without a model, adopted by the session that DataFrames use."""

from collections.abc import Callable, Iterator

import pytest

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends.fake import fake_backend, text_tokens
from mlx_nb.request import Request
from mlx_nb.session.session import Session, default_session

Adopt = Callable[..., EngineCore]


def prompt_of(request: Request) -> str:
    """Return the text of a request's prompt."""
    return bytes(request.prompt_token_ids).decode()


def shout(request: Request) -> list[int]:
    """Answer the last line of the question in capitals; fail where it says "fail"."""
    question = prompt_of(request).removesuffix("\nassistant: ").removeprefix("user: ")
    if "fail" in question:
        raise RuntimeError("the script failed")
    return text_tokens(question.upper())


@pytest.fixture
def session() -> Iterator[Session]:
    """Return the session, empty before and after."""
    session = default_session()
    session.stop_all()
    yield session
    session.stop_all()


@pytest.fixture
def adopt(session: Session) -> Adopt:
    """Return a function that starts a fake engine: `adopt(script, name=…, batch=…, step_s=…)`."""

    def start(script=shout, *, name="default", batch=4, **options) -> EngineCore:
        config = EngineConfig(
            scheduler_config=SchedulerConfig(completion_batch_size=batch, enable_prefix_cache=False)
        )
        core = EngineCore(None, None, config, backend=fake_backend(script, **options))
        session.adopt(name, "fake", AsyncEngineCore.over(core))
        return core

    return start


@pytest.fixture
def engine(adopt: Adopt) -> EngineCore:
    """Return an engine that shouts."""
    return adopt()
