"""Folders load evaluated, in the precision the device is good at; broken ones say what to do."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_nb.backends import loader
from mlx_nb.errors import ModelLoadError
from mlx_nb.outputs import LoadProgress

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
    # Keeps its frequencies in an array that parameters() leaves out.
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def random_model(seed: int = 1) -> Any:
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    weights = [
        (name, 0.3 * mx.random.normal(value.shape)) for name, value in tree_flatten(model.parameters())
    ]
    model.update(tree_unflatten(weights))
    return model


def save(model: Any, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model(), tmp_path / "tiny")


@pytest.fixture
def quantized_folder(tmp_path: Path) -> Path:
    model = random_model()
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    return save(model, tmp_path / "tiny-4bit", quantization={"group_size": 32, "bits": 4})


@pytest.fixture
def slow_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "half_precision_is_emulated", lambda: True)


@pytest.fixture
def fast_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "half_precision_is_emulated", lambda: False)


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[5, 17, 130, 42, 7, 99, 250, 1]])).astype(mx.float32))


def on_another_thread(call: Callable[[], Any]) -> Any:
    result: list[Any] = []

    def work() -> None:
        try:
            result.append(call())
        except RuntimeError as error:
            result.append(error)
        mx.clear_streams()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(result[0], RuntimeError):
        raise result[0]
    return result[0]


# Loading


def test_a_folder_loads_with_what_people_and_caches_need_to_know(folder: Path) -> None:
    loaded = loader.load(folder)
    assert loaded.path == folder
    assert loaded.precision == "float32"
    assert loaded.weight_bytes == sum(value.nbytes for _, value in tree_flatten(random_model().parameters()))
    assert loaded.context_length == 1024
    assert loaded.backend.startswith("MLX ")
    assert loaded.notes == ()
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße")) == "Grüße"
    np.testing.assert_allclose(logits(loaded.model), logits(random_model()), rtol=1e-5)


def test_progress_ends_with_ready(folder: Path) -> None:
    seen: list[LoadProgress] = []
    loader.load(folder, on_progress=seen.append)
    assert [progress.stage for progress in seen] == ["load", "ready"]
    assert seen[-1].fraction == 1.0


def test_a_loaded_model_steps_on_another_thread(folder: Path) -> None:
    loaded = loader.load(folder)
    np.testing.assert_allclose(
        on_another_thread(lambda: logits(loaded.model)), logits(random_model()), rtol=1e-5
    )


def test_evaluate_readies_a_lazy_model_for_another_thread(folder: Path) -> None:
    lazy, _ = mlx_lm.load(str(folder), lazy=True)
    with pytest.raises(RuntimeError, match="Stream"):
        on_another_thread(lambda: logits(lazy))
    model, _ = mlx_lm.load(str(folder), lazy=True)
    loader.evaluate(model)
    np.testing.assert_allclose(on_another_thread(lambda: logits(model)), logits(random_model()), rtol=1e-5)


# Precision


def test_where_half_precision_is_emulated_quantised_weights_become_float32(
    quantized_folder: Path, slow_half_precision: None, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = mlx_lm.load(str(quantized_folder))
    layer = packed.layers[0].mlp.up_proj
    scales, biases = (value.astype(mx.float32) for value in (layer.scales, layer.biases))
    expected = mx.dequantize(layer.weight, scales, biases, group_size=32, bits=4)
    with caplog.at_level(logging.INFO, "mlx_nb"):
        loaded = loader.load(quantized_folder)
    assert loaded.precision == "float32"
    assert {str(value.dtype) for _, value in tree_flatten(loaded.model.parameters())} == {"mlx.core.float32"}
    np.testing.assert_array_equal(np.array(loaded.model.layers[0].mlp.up_proj.weight), np.array(expected))
    assert len(loaded.notes) == 1
    assert [record.getMessage() for record in caplog.records].count(f"{loaded.notes[0]}.") == 1


def test_where_half_precision_is_emulated_bfloat16_becomes_float32(
    tmp_path: Path, slow_half_precision: None
) -> None:
    model = random_model()
    model.set_dtype(mx.bfloat16)
    loaded = loader.load(save(model, tmp_path / "half"))
    assert loaded.precision == "float32"
    assert "bfloat16" in loaded.notes[0]
    expected = model.model.norm.weight.astype(mx.float32)
    np.testing.assert_array_equal(np.array(loaded.model.model.norm.weight), np.array(expected))


def test_elsewhere_the_checkpoint_keeps_its_own_precision(
    quantized_folder: Path, tmp_path: Path, fast_half_precision: None
) -> None:
    loaded = loader.load(quantized_folder)
    assert (loaded.precision, loaded.notes) == ("4-bit", ())
    assert loaded.model.layers[0].mlp.up_proj.bits == 4
    model = random_model()
    model.set_dtype(mx.bfloat16)
    assert loader.load(save(model, tmp_path / "half")).precision == "bfloat16"


def test_a_model_that_would_not_fit_is_refused_before_it_is_read(
    quantized_folder: Path, slow_half_precision: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_float32 = sum(value.nbytes for _, value in tree_flatten(random_model().parameters()))
    assert (quantized_folder / "model.safetensors").stat().st_size < in_float32 / 2
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": in_float32}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    with pytest.raises(ModelLoadError, match=r"GB in float32.* choose a smaller model"):
        loader.load(quantized_folder)
    pages["SC_PHYS_PAGES"] = 2 * in_float32
    assert loader.load(quantized_folder).weight_bytes == in_float32


# Adapters


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Any]:
    """A LoRA on random_model(), and the model with it applied."""
    settings = {"rank": 2, "scale": 4.0, "dropout": 0.0}
    model = random_model()
    model.freeze()
    linear_to_lora_layers(model, 2, settings)
    mx.random.seed(9)
    trained = [
        (name, mx.random.normal(value.shape)) for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.update(tree_unflatten(trained))
    model.eval()
    folder = tmp_path / "adapter"
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(trained))
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, model


def test_an_adapter_changes_the_model_and_the_fingerprint(folder: Path, adapter: tuple[Path, Any]) -> None:
    path, expected = adapter
    plain, adapted = loader.load(folder), loader.load(folder, adapter_path=path)
    np.testing.assert_allclose(logits(adapted.model), logits(expected), rtol=1e-4, atol=1e-4)
    assert adapted.fingerprint != plain.fingerprint
    assert str(path) in adapted.notes[-1]


def test_a_folder_that_is_no_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks adapter_config\.json"):
        loader.load(folder, adapter_path=tmp_path)


def test_an_adapter_of_another_model_is_refused(folder: Path, adapter: tuple[Path, Any]) -> None:
    path, _ = adapter
    mx.save_safetensors(str(path / "adapters.safetensors"), {"model.layers.7.x.lora_a": mx.zeros((2, 2))})
    with pytest.raises(ModelLoadError, match="doesn't fit the model"):
        loader.load(folder, adapter_path=path)


# Fingerprints


def test_a_copy_elsewhere_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert loader.load(copy).fingerprint == loader.load(folder).fingerprint


def test_other_weights_of_the_same_shape_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = save(random_model(seed=2), tmp_path / "other")
    assert loader.load(other).fingerprint != loader.load(folder).fingerprint


def test_another_tokenizer_has_another_fingerprint(folder: Path) -> None:
    before = loader.load(folder).fingerprint
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 7}))
    assert loader.load(folder).fingerprint != before


def test_a_large_file_is_told_apart_without_reading_it_whole(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for file, last in [(first, b"x"), (second, b"y")]:
        with file.open("wb") as stream:
            stream.truncate(2**33)
            stream.seek(2**33 - 1)
            stream.write(last)
    assert loader.content_key(first) == loader.content_key(first)
    assert loader.content_key(first) != loader.content_key(second)


# Broken folders


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damaged_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def config_without_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt99"}))


def own_code(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_file": "model.py"}))


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_pytorch(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def only_gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def damaged_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 100)


def short_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


def lost_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def other_shape(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        (no_config, r"has no config\.json"),
        (damaged_config, r"config\.json is damaged"),
        (config_without_type, r"config\.json is damaged.*model_type"),
        (unknown_type, "type 'gpt99', which mlx-lm .* doesn't know"),
        (own_code, "trust_remote_code=True"),
        (no_weights, r"no model\*\.safetensors: fetch"),
        (only_pytorch, r"mlx_lm\.convert"),
        (only_gguf, r"give the file instead .*model\.gguf"),
        (damaged_weights, "fetch it again"),
        (short_weights, "[Ff]etch it again"),
        (lfs_pointer, "git lfs pull"),
        (lost_shard, "model-00002-of-00002"),
        (other_shape, "don't fit its config"),
        (no_tokenizer, "has no tokenizer"),
        (damaged_tokenizer, "tokenizer .* can't be read"),
    ],
)
def test_a_broken_folder_says_in_one_line_what_to_do(
    harm: Callable[[Path], None], line: str, folder: Path
) -> None:
    harm(folder)
    with pytest.raises(ModelLoadError, match=line) as caught:
        loader.load(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="There is no folder"):
        loader.load(tmp_path / "nowhere")


def test_the_original_error_is_kept_as_the_cause(folder: Path) -> None:
    unknown_type(folder)
    with pytest.raises(ModelLoadError) as caught:
        loader.load(folder)
    assert isinstance(caught.value.__cause__, ValueError)


HOLDS = """
import os, threading
import mlx.core as mx
from mlx_nb.backends.loader import leave_thread

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def work():
    for _ in range(3):  # glibc learns from the first round to keep the memory of such arrays
        arrays = [mx.full((256, 1024), i) for i in range(300)]
        mx.eval(arrays)
        kept = arrays[::20]  # what lies between them doesn't go back by itself
        del arrays
        mx.clear_cache()
    before = resident()
    leave_thread()
    print(before - resident())

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_thread_that_leaves_gives_memory_back_to_the_system() -> None:
    given_back = subprocess.run(
        [sys.executable, "-c", HOLDS], capture_output=True, text=True, check=True
    ).stdout

    assert float(given_back) > 100
