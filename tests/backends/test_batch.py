"""The batch backend in an engine: prefixes, faults of the model, memory, what it refuses."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from models import FAMILIES, tiny, tiny_folder
from scripts import wait_until

from mlx_nb import (
    AsyncEngineCore,
    CacheMismatchError,
    EngineConfig,
    EngineCore,
    ModelLoadError,
    RequestError,
    SamplingParams,
    SchedulerConfig,
)

PROMPT = "the quick tiny number judges my corpus of words " * 3
GREEDY = SamplingParams(max_tokens=6, temperature=0)
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture
def start() -> Any:
    engines = []

    def started(family: str = "llama", model: Any = None, **scheduler: Any) -> EngineCore:
        loaded = tiny(family) if model is None else (model, tiny(family)[1])
        engine = EngineCore(*loaded, EngineConfig(scheduler_config=SchedulerConfig(**scheduler)))
        engines.append(engine)
        engine.launch()
        engine.wait_ready(30)
        return engine

    yield started
    for engine in engines:
        engine.close()


def prompt_of(engine: EngineCore) -> list[int]:
    return engine.codec.encode(PROMPT)


# -- prefixes -------------------------------------------------------------------------------------------


def test_hits_misses_and_saved_tokens_are_counted(start: Any) -> None:
    engine = start()
    length = engine.generate_sync(PROMPT, GREEDY).prompt_tokens
    second = engine.generate_sync(PROMPT, GREEDY)
    stats = engine.get_cache_stats()
    assert second.cached_tokens == length - 1 == stats["tokens_saved"]
    assert (stats["hits"], stats["misses"], stats["hit_rate"], stats["entry_count"]) == (1, 1, 0.5, 1)
    assert 0 < stats["current_memory_mb"] < stats["max_memory_mb"]
    assert engine.get_stats()["prefix_cache"] == stats


def test_without_a_prefix_cache_nothing_is_kept(start: Any, tmp_path: Path) -> None:
    engine = start(enable_prefix_cache=False)
    for _ in range(2):
        assert engine.generate_sync(PROMPT, GREEDY).cached_tokens == 0
    assert engine.get_cache_stats() is None
    assert engine.save_cache_to_disk(tmp_path / "none") is False


def test_a_small_budget_evicts_and_stays_within(start: Any) -> None:
    engine = start(cache_memory_mb=0.2)
    for n in range(12):
        engine.generate_sync(f"{n} {PROMPT}", GREEDY)
    stats = engine.get_cache_stats()
    assert stats["evictions"] > 0
    assert stats["current_memory_mb"] <= 0.2
    assert stats["entry_count"] >= 1


def test_clearing_forgets_prefixes_and_says_what_was_freed(start: Any) -> None:
    engine = start()
    engine.generate_sync(PROMPT, GREEDY)
    held = engine.get_stats()["memory"]["prefix"]
    freed = engine.clear_runtime_caches()
    assert freed["prefix_cache_bytes"] == held > 0
    assert engine.get_cache_stats()["entry_count"] == 0
    assert engine.generate_sync(PROMPT, GREEDY).cached_tokens == 0
    engine.clear_prefix_cache()
    assert engine.get_stats()["memory"]["prefix"] == 0
    engine.stop_now()
    assert engine.clear_runtime_caches() is None


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_prefixes_are_found_again_in_every_family(
    family: str, start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized = {"kv_cache_quantization": True, "kv_cache_quantization_group_size": 32}
    engine = start(family, **quantized)
    length = engine.generate_sync(PROMPT, GREEDY).prompt_tokens
    assert engine.generate_sync(PROMPT, GREEDY).cached_tokens == length - 1
    assert engine.save_cache_to_disk(tmp_path / "saved")
    second = start(family, mlx_lm.load(str(tiny_folder(family)))[0], **quantized)
    assert second.load_cache_from_disk(tmp_path / "saved") >= 1
    assert second.generate_sync(PROMPT, GREEDY).cached_tokens == length - 1
    assert [record for record in caplog.records if record.name == "mlx_nb"] == []


def test_an_aborted_request_leaves_no_prefix(start: Any) -> None:
    engine = start()
    request_id = engine.submit(PROMPT, LONG)
    wait_until(lambda: engine.get_stats()["total_completion_tokens"] > 2)
    engine.abort(request_id)
    wait_until(lambda: engine.get_stats()["num_requests_processed"] == 1)
    assert engine.get_cache_stats()["entry_count"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3", "mamba2"])
def test_later_requests_resume_at_a_prefix_boundary(family: str, start: Any) -> None:
    engine = start(family)
    tokens = prompt_of(engine)
    engine.generate_sync([*tokens, 11, 12], GREEDY, prefix_boundary=len(tokens))
    later = engine.generate_sync([*tokens, 21, 22, 23], GREEDY)
    assert later.cached_tokens >= len(tokens)


def test_another_models_saved_prefixes_are_refused(tmp_path: Path) -> None:
    handles = [AsyncEngineCore.from_pretrained(tiny_folder("llama", seed)) for seed in (0, 1)]
    for handle in handles:
        handle.start()
        handle.generate_batch_sync([PROMPT], GREEDY)
    assert handles[0].save_cache_to_disk(tmp_path / "saved")
    with pytest.raises(CacheMismatchError, match="another model"):
        handles[1].load_cache_from_disk(tmp_path / "saved")
    assert handles[0].load_cache_from_disk(tmp_path / "saved") == 1
    for handle in handles:
        handle.close()


def test_prefixes_of_a_model_that_was_handed_over_are_its_own_too(start: Any, tmp_path: Path) -> None:
    first = start(model=mlx_lm.load(str(tiny_folder("llama", 0)))[0])
    first.generate_sync(PROMPT, GREEDY)
    first.save_cache_to_disk(tmp_path / "saved")
    other = start(model=mlx_lm.load(str(tiny_folder("llama", 1)))[0])  # the same shapes, other weights
    with pytest.raises(CacheMismatchError):
        other.load_cache_from_disk(tmp_path / "saved")


# -- faults ---------------------------------------------------------------------------------------------


class Breakable:
    """A model that fails when told to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.broken: Exception | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_model_that_raises_ends_the_requests_in_its_step_and_serves_the_next() -> None:
    from mlx_nb.backends.batch import BatchBackend

    model, tokenizer = tiny()
    breakable = Breakable(model)
    engine = EngineCore(None, None, backend=lambda config, _: BatchBackend(breakable, tokenizer, config))
    engine.launch()
    expected = engine.generate_sync(PROMPT, GREEDY).output_token_ids
    waiting = [engine.submit(PROMPT, LONG) for _ in range(3)]
    wait_until(lambda: engine.get_stats()["total_completion_tokens"] > 30)
    breakable.broken = ZeroDivisionError("the model's step")
    for request_id in waiting:
        with pytest.raises(ZeroDivisionError, match="the model's step"):
            list(engine.stream_sync(request_id, timeout=20))
    assert engine.state == "running"
    assert engine.generate_sync(PROMPT, GREEDY).output_token_ids == expected
    engine.close()


# -- what is refused ------------------------------------------------------------------------------------


def test_tokens_beyond_the_vocabulary_are_refused(start: Any) -> None:
    engine = start()
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.generate_sync("q", SamplingParams(stop_token_ids=[10**6]))
    with pytest.raises(RequestError, match="logit_bias"):
        engine.generate_sync("q", SamplingParams(logit_bias={10**6: 1.0}))


def test_a_bounded_cache_is_refused_in_a_batch() -> None:
    config = EngineConfig(scheduler_config=SchedulerConfig(max_kv_size=64))
    engine = EngineCore(*tiny(), config)
    engine.launch()
    with pytest.raises(ModelLoadError, match="max_kv_size"):
        engine.wait_ready(30)
    engine.close()


def test_an_over_long_prompt_is_refused_and_the_rest_of_its_batch_answered(start: Any) -> None:
    engine = start()
    outputs = engine.generate_batch_sync(["a", [5] * 3000, "b"], GREEDY, errors="return")
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "2,048" in str(outputs[1].error)


def test_the_context_is_filled_to_its_end_and_no_further(start: Any) -> None:
    engine = start("llama")
    output = engine.generate_sync([5] * 2040, SamplingParams(max_tokens=100, temperature=0))
    assert (output.completion_tokens, output.finish_reason) == (8, "length")


# -- memory ---------------------------------------------------------------------------------------------


def test_memory_is_told_in_bytes_and_rows_give_theirs_back(start: Any) -> None:
    engine = start(enable_prefix_cache=False)
    request_id = engine.submit(PROMPT, LONG)
    wait_until(lambda: engine.get_stats()["memory"]["kv"] > 0)
    memory = engine.get_stats()["memory"]
    assert memory["limit"] > memory["active"] >= memory["weights"] > 0
    engine.abort(request_id)
    wait_until(lambda: engine.get_stats()["memory"]["kv"] == 0)


def test_memory_does_not_grow_with_the_number_of_requests(start: Any) -> None:
    engine = start(cache_memory_mb=0.5)
    prompts = [f"{n} {PROMPT}" for n in range(8)]

    def after(rounds: int) -> int:
        for n in range(rounds):
            engine.generate_batch_sync([f"{n} {prompt}" for prompt in prompts], GREEDY)
        engine.clear_runtime_caches()
        return int(mx.get_active_memory())

    early = after(3)
    assert after(6) < early + 2**20
