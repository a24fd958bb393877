"""Stopping an engine that loads ends what it is doing, a download above all, at its next word of progress."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from scripts import wait_until

from mlx_nb import EngineConfig, EngineCore, EngineStopped, LoadProgress


def test_loading_ends_when_it_next_reports() -> None:
    reported: list[int] = []

    def download_for_ever(config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> Any:
        while True:
            on_progress(LoadProgress("download", "on its way"))
            reported.append(1)
            time.sleep(0.01)

    engine = EngineCore(None, None, backend=download_for_ever)
    engine.launch()
    wait_until(lambda: reported)

    engine.stop_now(10)

    assert (engine.state, engine.failure) == ("stopped", None)
    with pytest.raises(EngineStopped):
        engine.wait_ready(1)
