"""The wire between Python and the browser; js/test/protocol.test.ts checks the same fixture."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_fields import check_fields
from moving_engine import Info, MovingEngine

from mlx_nb.widgets import MonitorWidget
from mlx_nb.widgets import protocol as wire

FIXTURE = Path(__file__).parents[2] / "js" / "test" / "fixtures" / "protocol.json"
PARSED = {
    "view": wire.ViewChange("a1", 1, open=True),
    "abort": wire.Abort("7f3a"),
    "pause": wire.EngineCommand("pause"),
    "resume": wire.EngineCommand("resume"),
    "abort_all": wire.EngineCommand("abort_all"),
    "clear_cache": wire.EngineCommand("clear_cache"),
    "stop": wire.EngineCommand("stop"),
    "restart": wire.EngineCommand("restart"),
}


@pytest.fixture(scope="module")
def fixture() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text(encoding="utf-8"))


class ScriptedEngine(MovingEngine):
    """Reports the statistics of the fixture."""

    model_name = "Qwen3-8B-Instruct"

    def __init__(self, fixture: dict[str, Any]) -> None:
        super().__init__()
        self.info = Info("4-bit", "MLX 0.32, Metal")
        self._fixture = fixture

    def get_stats(self) -> dict[str, Any]:
        return self._fixture["stats"]

    def get_cache_stats(self) -> dict[str, Any]:
        return self._fixture["cache_stats"]


def test_statistics_become_the_traits_of_the_fixture(fixture: dict[str, Any]) -> None:
    engine = ScriptedEngine(fixture)
    widget = MonitorWidget(engine)
    assert {name: getattr(widget, name) for name in fixture["traits"]} == fixture["traits"]
    widget.close()


def test_the_fixture_names_every_trait_and_field(fixture: dict[str, Any]) -> None:
    check_fields(fixture["traits"], wire.MonitorTraits)


def test_every_message_of_the_browser_is_understood(fixture: dict[str, Any]) -> None:
    assert {name: wire.parse_message(message) for name, message in fixture["messages"].items()} == PARSED


def test_anything_else_is_refused(fixture: dict[str, Any]) -> None:
    assert [wire.parse_message(message) for message in fixture["refused"]] == [None] * len(fixture["refused"])
