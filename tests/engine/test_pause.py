"""While an engine is paused what runs goes on, and what comes waits."""

import time
from typing import Any

import pytest
from scripts import wait_until

from mlx_nb import EngineNotStarted, EngineStopped, SamplingParams

LONG = SamplingParams(max_tokens=100_000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def ids(engine: Any, phase: str) -> list[str]:
    return [
        row["request_id"]
        for row in engine.get_stats()["requests"]
        if (row["phase"] == "waiting") == (phase == "waiting")
    ]


def test_what_runs_goes_on_and_what_comes_waits_until_resume(start: Any) -> None:
    engine = start(step_s=0.001)
    engine.submit("running", LONG, "first")
    wait_until(lambda: engine.get_stats()["requests"][0]["completion_tokens"] > 3)
    engine.pause()
    assert engine.get_stats()["paused"]
    second = engine.submit("waiting", SHORT, "second")
    made = engine.get_stats()["requests"][0]["completion_tokens"]
    wait_until(lambda: engine.get_stats()["requests"][0]["completion_tokens"] > made + 20)
    assert (ids(engine, "running"), ids(engine, "waiting")) == (["first"], ["second"])
    engine.resume()
    assert [output.finished for output in engine.stream_sync(second, timeout=5)][-1]
    assert not engine.get_stats()["paused"]


def test_a_paused_engine_with_nothing_to_run_rests(start: Any) -> None:
    engine = start()
    engine.pause()
    engine.submit("waiting", SHORT)
    steps = engine.get_stats()["steps_executed"]
    began = time.thread_time(), time.process_time()
    time.sleep(0.3)
    assert engine.get_stats()["steps_executed"] == steps
    assert time.process_time() - began[1] < 0.15
    engine.resume()
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 1)


def test_a_waiting_request_can_be_aborted_or_run_out_of_time(start: Any) -> None:
    engine = start()
    engine.pause()
    aborted, late = engine.submit("a", SHORT), engine.submit("b", SHORT, timeout=0.1)
    assert engine.abort(aborted)
    with pytest.raises(TimeoutError, match="not finished within"):
        list(engine.stream_sync(late, timeout=5))
    assert engine.get_stats()["active_requests"] == 0


def test_stop_ends_what_waits_and_a_restarted_engine_is_not_paused(start: Any) -> None:
    engine = start()
    engine.pause()
    request = engine.submit("a", SHORT)
    engine.stop_now()
    with pytest.raises(EngineStopped):
        list(engine.stream_sync(request))
    with pytest.raises(EngineStopped):
        engine.pause()
    engine.restart_soon()
    engine.wait_ready()
    assert not engine.paused
    assert engine.generate_sync("a", SHORT).completion_tokens == 3


def test_restart_soon_ends_what_runs(start: Any) -> None:
    engine = start(step_s=0.001)
    request = engine.submit("a", LONG)
    engine.restart_soon()
    with pytest.raises(EngineStopped):
        list(engine.stream_sync(request))
    engine.wait_ready()
    assert engine.generate_sync("a", SHORT).completion_tokens == 3


def test_without_a_start_there_is_nothing_to_pause(make: Any) -> None:
    with pytest.raises(EngineNotStarted):
        make().pause()
