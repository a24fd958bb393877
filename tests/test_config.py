"""Configurations are checked once, when they are made."""

from typing import Any

import pytest

from mlx_nb import EngineConfig, SchedulerConfig

BAD_SCHEDULER: list[tuple[str, Any]] = [
    ("max_num_seqs", 0), ("max_num_seqs", True), ("max_num_batched_tokens", 0), ("prefill_batch_size", -1),
    ("completion_batch_size", 1.5), ("prefill_step_size", 0), ("policy", "random"), ("policy", None),
    ("enable_prefix_cache", 1), ("cache_memory_mb", -1), ("cache_memory_mb", "1"), ("cache_memory_percent", 1.1),
    ("cache_memory_percent", -0.1), ("kv_cache_quantization", "yes"), ("kv_cache_quantization_bits", 5),
    ("kv_cache_quantization_group_size", 48), ("max_kv_size", -1), ("policy", ["fcfs"]),
]  # fmt: skip
BAD_ENGINE: list[tuple[str, Any]] = [
    ("model_name", 5), ("scheduler_config", {"max_num_seqs": 3}), ("step_interval", -1), ("step_interval", "1"),
    ("stream_interval", 0), ("stream_interval", 1.5), ("gpu_memory_utilization", 0), ("gpu_memory_utilization", 1.1),
    ("gpu_memory_utilization", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_SCHEDULER, ids=map(str, BAD_SCHEDULER))
def test_a_scheduler_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD_ENGINE, ids=map(str, BAD_ENGINE))
def test_an_engine_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


def test_engine_settings_go_by_the_contracts_positions() -> None:
    scheduler = SchedulerConfig(max_num_seqs=3)
    config = EngineConfig("name", scheduler, 0.5, 2, 0.4)
    assert (config.model_name, config.scheduler_config, config.step_interval) == ("name", scheduler, 0.5)
    assert (config.stream_interval, config.gpu_memory_utilization) == (2, 0.4)


def test_without_a_scheduler_config_the_default_one_is_used() -> None:
    assert EngineConfig(scheduler_config=None).scheduler_config == SchedulerConfig()  # type: ignore[arg-type]


def test_rows_at_once_are_the_smaller_bound() -> None:
    assert SchedulerConfig(max_num_seqs=4, completion_batch_size=9).max_running == 4
    assert SchedulerConfig(max_num_seqs=9, completion_batch_size=4).max_running == 4


def test_defaults_are_those_of_the_contract() -> None:
    config = SchedulerConfig()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 8192)
    assert (config.prefill_batch_size, config.completion_batch_size, config.prefill_step_size) == (
        8,
        32,
        2048,
    )
    assert (config.policy, config.enable_prefix_cache, config.cache_memory_percent) == ("fcfs", True, 0.2)
