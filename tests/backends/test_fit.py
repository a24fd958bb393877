"""Whether a model fits is said before it is fetched or loaded, with a smaller one to try."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import make_folder

from mlx_nb import EngineConfig, ModelLoadError
from mlx_nb.backends import fit, loader, sources
from mlx_nb.backends.pretrained import Pretrained

GB = 10**9
LLAMA_8B = {
    "max_position_embeddings": 131_072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
FOUR_BIT = {**LLAMA_8B, "quantization": {"bits": 4, "group_size": 64}}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Choose the device's memory, in bytes."""
    return lambda count: monkeypatch.setattr(fit, "device_memory", lambda: int(count))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Choose what is free on every disk, in bytes."""
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free)))


def test_weights_and_a_request_are_counted_as_stored_or_as_float32() -> None:
    stored = fit.needs(LLAMA_8B, 16 * GB, float32=False)
    widened = fit.needs(LLAMA_8B, 16 * GB, float32=True)
    # 2 (keys, values) x 32 layers x 8 heads x 128 numbers, for 2,048 tokens
    numbers = 2 * 32 * 8 * 128 * 2048

    assert (stored.weights, stored.kv, stored.precision) == (16 * GB, 2 * numbers, "bfloat16")
    assert (widened.weights, widened.kv, widened.precision) == (32 * GB, 4 * numbers, "float32")
    assert stored.total == 16 * GB + 2 * numbers


def test_quantised_weights_grow_by_their_bits_with_scales_and_biases() -> None:
    assert fit.needs(FOUR_BIT, 45 * GB // 10, float32=True).weights == 32 * GB
    assert fit.precision(FOUR_BIT) == "4-bit"


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "many"}, {"text_config": None}])
def test_a_config_that_says_little_is_no_reason_to_fail(config: dict[str, Any]) -> None:
    assert fit.needs(config, 100, float32=False).kv == 0


def test_a_language_model_within_a_larger_one_is_found() -> None:
    whole = {"model_type": "vision", "text_config": LLAMA_8B}

    assert fit.needs(whole, 16 * GB, float32=False).kv == fit.needs(LLAMA_8B, 16 * GB, float32=False).kv


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_folder_is_counted_by_what_its_weights_are(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / family, family)

    needed = fit.needs_of(folder, float32=loader.half_precision_is_emulated())

    assert needed is not None
    assert needed.weights == pytest.approx(loader.load(folder).weight_bytes, rel=0.01)


def test_a_broken_folder_is_left_to_the_loader(tmp_path: Path) -> None:
    assert fit.needs_of(tmp_path, float32=True) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert fit.needs_of(tmp_path, float32=True) is None


def test_what_does_not_fit_memory_is_refused_with_a_smaller_one_of_its_family(
    memory: Callable[[float], None],
) -> None:
    memory(8 * GB)
    needed = fit.needs(FOUR_BIT, 45 * GB // 10, float32=True)

    with pytest.raises(ModelLoadError) as caught:
        fit.require_memory("mlx-community/Qwen3-8B-4bit", needed, 0.9)

    assert str(caught.value) == (
        "mlx-community/Qwen3-8B-4bit needs about 32.5 GB of memory (32.0 GB of weights in float32, 537 MB of KV "
        "cache for 2,048 tokens) and the engine may use 7.2 GB: try qwen3-0.6b (about 2.4 GB)."
    )
    fit.require_memory("small", fit.needs(FOUR_BIT, GB, float32=False), 0.9)


def test_without_a_smaller_one_it_only_says_so(memory: Callable[[float], None]) -> None:
    memory(1000)

    with pytest.raises(ModelLoadError, match=r": choose a smaller model\.$"):
        fit.require_memory("x", fit.Needs(2000, 0, 0, ""), 0.9)


@pytest.mark.parametrize(
    ("name", "limit", "alias"),
    [
        ("org/Qwen3-32B-4bit", 40 * GB, "qwen3-8b"),
        ("org/Qwen3-32B-4bit", 5 * GB, "qwen3-4b"),
        ("org/gemma-3-27b-it", 9 * GB, "gemma3-1b"),
        ("org/Phi-4", 3 * GB, "qwen3-4b"),
    ],
)
def test_the_suggestion_is_the_largest_that_fits_of_the_family_if_there_is_one(
    name: str, limit: int, alias: str
) -> None:
    found = fit.smaller(name, limit, float32=False)

    assert found is not None
    assert found[0] == alias
    assert found[1] <= limit


def test_what_does_not_fit_the_disk_says_where_else(disk: Callable[[float], None], tmp_path: Path) -> None:
    disk(3 * GB)

    with pytest.raises(ModelLoadError) as caught:
        fit.require_disk("org/Qwen3-8B", 16 * GB, tmp_path / "not" / "yet", "HF_HUB_CACHE")

    assert str(caught.value) == (
        f"org/Qwen3-8B takes 16.0 GB on disk and {tmp_path} has 3.0 GB left: free some, let HF_HUB_CACHE name a "
        "folder on another disk, or try qwen3-4b (about 2.2 GB)."
    )
    fit.require_disk("small", GB, tmp_path, "HF_HUB_CACHE")


def test_a_model_too_large_for_memory_is_not_loaded(
    memory: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "tiny")
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("it was loaded"))
    memory(100_000)

    with pytest.raises(ModelLoadError, match=r"tiny needs about .* and the engine may use 50 kB"):
        Pretrained(str(folder))(EngineConfig(gpu_memory_utilization=0.5), lambda _: None)


def test_a_file_too_large_for_memory_is_not_converted(
    memory: Callable[[float], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_NB_CACHE", str(tmp_path))
    monkeypatch.setattr("mlx_nb.backends.gguf.converted_size", lambda *_, **__: 2000)
    (tmp_path / "x.gguf").touch()
    memory(1000)

    with pytest.raises(ModelLoadError, match="x needs about 2 kB of memory"):
        sources.fetch(sources.resolve(str(tmp_path / "x.gguf")))
