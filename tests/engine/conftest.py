"""Engines over the fake backend: no model, answers known beforehand."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_nb import EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends.fake import fake_backend

Make = Callable[..., EngineCore]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlx-engine"]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make an engine, not started yet; it is closed with the test and leaves no thread."""
    before = engine_threads()
    engines: list[EngineCore] = []

    def made(
        *script: Any, config: dict[str, Any] | None = None, backend: Any = None, **options: Any
    ) -> EngineCore:
        given = dict(config or {})
        fields = {name: given.pop(name) for name in ("step_interval", "stream_interval") if name in given}
        settings = EngineConfig(scheduler_config=SchedulerConfig(**given), **fields)
        engine = EngineCore(None, None, settings, backend=backend or fake_backend(*script, **options))
        engines.append(engine)
        return engine

    yield made
    for engine in engines:
        engine.close()
    assert [thread for thread in engine_threads() if thread not in before] == []


@pytest.fixture
def start(make: Make) -> Make:
    """Make an engine and start it."""

    def started(*script: Any, **options: Any) -> EngineCore:
        engine = make(*script, **options)
        engine.launch()
        engine.wait_ready(10)
        return engine

    return started
