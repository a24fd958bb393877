"""Engines to compare with mlx-lm's own single-stream generation."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from models import tiny

from mlx_nb import EngineConfig, EngineCore, SchedulerConfig
from mlx_nb.backends import loader, sources

Load = Callable[[str], tuple[Any, Any]]
Start = Callable[..., EngineCore]


@pytest.fixture(scope="session")
def load() -> Load:
    """Model and tokenizer by family; "demo" is the real demo model."""
    loaded: dict[str, tuple[Any, Any]] = {}

    def by_family(family: str) -> tuple[Any, Any]:
        if family != "demo":
            return tiny(family)
        if family not in loaded:
            real = loader.load(sources.fetch(sources.resolve("demo")))
            loaded[family] = real.model, real.tokenizer
        return loaded[family]

    return by_family


@pytest.fixture
def start(load: Load) -> Iterator[Start]:
    """Start an engine around a family's model; it ends with the test."""
    engines: list[EngineCore] = []

    def started(family: str, **scheduler: Any) -> EngineCore:
        config = EngineConfig(scheduler_config=SchedulerConfig(**scheduler))
        engine = EngineCore(*load(family), config)
        engines.append(engine)
        engine.launch()
        engine.wait_ready()
        return engine

    yield started
    for engine in engines:
        engine.close()
