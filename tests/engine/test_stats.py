"""Statistics: the contract's names, consistent at any moment, cheap to read."""

import asyncio
import threading
import time
from typing import Any

from scripts import by_prompt, for_ever, raises, says, until, wait_until

from mlx_nb import SamplingParams

LONG = SamplingParams(max_tokens=4000)
Make = Any

NAMES = {
    "running", "uptime_seconds", "steps_executed", "active_requests", "num_waiting", "num_running",
    "num_requests_processed", "total_prompt_tokens", "total_completion_tokens", "generation_tps", "prompt_tps",
    "memory", "prefix_cache", "requests",
}  # fmt: skip
ROW_NAMES = {
    "request_id", "status", "phase", "prompt_tokens", "completion_tokens", "max_tokens", "progress", "elapsed_s",
    "ttft_s", "tokens_per_second", "cache_hit_type", "cached_tokens",
}  # fmt: skip
RISING = (
    "steps_executed",
    "num_requests_processed",
    "total_prompt_tokens",
    "total_completion_tokens",
    "uptime_seconds",
)
CACHE_NAMES = {
    "hits", "misses", "hit_rate", "evictions", "tokens_saved", "entry_count", "current_memory_mb", "max_memory_mb",
    "memory_utilization", "vision_hits", "vision_misses", "vision_entries",
}  # fmt: skip


def test_an_engine_that_never_ran_has_statistics(make: Make) -> None:
    stats = make().get_stats()
    assert set(stats) >= NAMES
    assert stats["running"] is False
    assert stats["requests"] == []
    assert stats["prefix_cache"] is None


async def test_statistics_have_the_contracts_names(start: Make) -> None:
    engine = start(for_ever, step_s=0.001)
    request_id = await engine.add_request("question", LONG, "mine")
    await until(lambda: engine.get_stats()["total_completion_tokens"] > 3)
    stats = engine.get_stats()
    assert set(stats) >= NAMES
    assert set(stats["memory"]) >= {"active", "cache", "peak", "limit"}
    assert set(stats["prefix_cache"]) == CACHE_NAMES == set(engine.get_cache_stats())
    (row,) = stats["requests"]
    assert set(row) >= ROW_NAMES
    assert (row["request_id"], row["phase"], row["status"]) == ("mine", "decode", "running")
    assert (row["prompt_tokens"], row["max_tokens"]) == (8, 4000)
    assert 0 < row["progress"] < 1
    assert 0 <= row["ttft_s"] <= row["elapsed_s"]
    assert stats["generation_tps"] > 0
    await engine.abort_request(request_id)


async def test_phases_follow_each_other(start: Make) -> None:
    engine = start(for_ever, step_s=0.002, config={"max_num_seqs": 1, "prefill_step_size": 4})
    await engine.add_request("x" * 200, LONG, "first")
    await engine.add_request("x", LONG, "second")
    phases: dict[str, list[str]] = {"first": [], "second": []}
    while phases["first"][-1:] != ["decode"]:
        for row in engine.get_stats()["requests"]:
            seen = phases[row["request_id"]]
            if seen[-1:] != [row["phase"]]:
                seen.append(row["phase"])
        await asyncio.sleep(0.001)
    assert phases["second"] == ["waiting"]
    assert phases["first"] in (["waiting", "prefill", "decode"], ["prefill", "decode"])
    engine.abort_all()


def test_totals_add_up(start: Make) -> None:
    engine = start(says("four"), config={"enable_prefix_cache": False})
    engine.generate_batch_sync(["abc"] * 10)
    engine.generate_sync("q", SamplingParams(max_tokens=0))
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 11)
    stats = engine.get_stats()
    assert stats["total_prompt_tokens"] == 30
    assert stats["total_completion_tokens"] == 40
    assert stats["prefix_cache"] is None
    assert stats["active_requests"] == 0


def test_counters_outlive_a_restart(start: Make) -> None:
    engine = start(says("four"))
    engine.generate_sync("abc")
    engine.stop_now()
    assert engine.get_stats()["num_requests_processed"] == 1
    engine.launch()
    engine.generate_sync("abc")
    assert engine.get_stats()["num_requests_processed"] == 2


def test_reading_is_cheap_under_load(start: Make) -> None:
    engine = start(for_ever, step_s=0.001, config={"max_num_seqs": 32})
    for _ in range(64):
        engine.submit("question", LONG)
    began = time.monotonic()
    for _ in range(100):
        stats = engine.get_stats()
        assert stats["num_waiting"] + stats["num_running"] == stats["active_requests"] == 64
    assert time.monotonic() - began < 3
    engine.abort_all()


async def test_timings_are_in_order(start: Make) -> None:
    output = await start(says("hello"), step_s=0.002).generate("q")
    assert 0 <= output.timings["queue_s"] <= output.timings["ttft_s"] <= output.timings["total_s"]


def test_statistics_are_consistent_at_every_moment(start: Make) -> None:
    """Read as fast as possible from two threads, while requests come, go, fail, are aborted and make room."""
    engine = start(
        by_prompt({"bad": raises(ArithmeticError("bad"), after=3)}),
        kv_budget=1500,
        config={"max_num_seqs": 3},
    )
    over = threading.Event()
    wrong: list[Any] = []
    looks = 0

    def look() -> None:
        nonlocal looks
        before = engine.get_stats()
        while not over.is_set():
            stats = engine.get_stats()
            looks += 1
            rows = stats["requests"]
            phases = [row["phase"] for row in rows]
            if not (
                stats["active_requests"] == stats["num_waiting"] + stats["num_running"] == len(rows)
                and stats["num_running"] == len(rows) - phases.count("waiting") <= stats["max_running"] == 3
                and all(row["status"] in ("waiting", "running", "preempted") for row in rows)
                and all(0 <= row["progress"] <= 1 for row in rows)
                and all(row["completion_tokens"] <= row["max_tokens"] for row in rows)
                and all(row["cached_tokens"] <= row["prompt_tokens"] for row in rows)
                and len({row["request_id"] for row in rows}) == len(rows)
                and all(stats[name] >= before[name] for name in RISING)
                and stats["prefix_cache"]["hits"] >= before["prefix_cache"]["hits"]
                and 0 <= stats["prefix_cache"]["hit_rate"] <= 1
            ):
                wrong.append(stats)
                return
            before = stats

    watchers = [threading.Thread(target=look) for _ in range(2)]
    for watcher in watchers:
        watcher.start()
    for n in range(60):
        ids = [engine.submit(prompt) for prompt in ("bad", f"good {n}", "other")]
        engine.submit("unread")
        if n % 3 == 0:
            engine.abort(ids[2])
        for request_id in ids:
            try:
                list(engine.stream_sync(request_id, timeout=30))
            except ArithmeticError:
                assert request_id == ids[0]
    over.set()
    for watcher in watchers:
        watcher.join(30)
    assert wrong == []
    assert looks > 20
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 240)


async def test_speeds_are_means_over_the_steps_that_were_at_it(start: Make) -> None:
    engine = start(for_ever, step_s=0.01)
    before = engine.get_stats()
    await engine.generate("question", SamplingParams(max_tokens=20))
    stats = engine.get_stats()

    assert (before["mean_prompt_tps"], before["mean_generation_tps"]) == (None, None)
    assert 0 < stats["mean_generation_tps"] <= 100
    assert 0 < stats["mean_prompt_tps"] <= 800
    await asyncio.sleep(0.05)
    assert engine.get_stats()["mean_generation_tps"] == stats["mean_generation_tps"]
