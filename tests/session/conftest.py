"""A session whose engines end with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_nb import AsyncEngineCore, EngineConfig, EngineCore
from mlx_nb.backends.fake import fake_backend
from mlx_nb.session.session import default_session

Adopt = Callable[..., EngineCore]


@pytest.fixture
def adopt() -> Iterator[Adopt]:
    """Start a fake engine in the session; without a script it answers with the prompt, for ever."""

    def start(*script: Any, name: str = "default", **options: Any) -> EngineCore:
        core = EngineCore(None, None, EngineConfig(), backend=fake_backend(*script, **options))
        default_session().adopt(name, "fake", AsyncEngineCore.over(core))
        core.wait_ready(10)
        return core

    yield start
    default_session().stop_all(5)
