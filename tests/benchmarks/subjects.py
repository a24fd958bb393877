"""The model that contenders are compared on: made ready once, loaded by each of them in the same way.

A subject is a folder in mlx-lm's format, or a recipe: a random model that every process draws from one seed, so that
nothing is fetched and no gigabytes are written. Either never ends an answer by itself: its end token is one that no
model writes, so that every contender makes as many tokens.

usage: python -m tests.benchmarks.subjects MODEL FOLDER [DTYPE] [BITS]
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "vocab_size": 400,
        "tie_word_embeddings": True,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
NEVER = "<|never|>"
GROUP = 64
GAIN = 1.5
"""Smaller, and greedy answers settle on one token."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


# -- making one ready: in a process of its own, since it takes MLX ---------------------------------------


def make(model: str, folder: Path, dtype: str | None = None, bits: int | None = None) -> None:
    """Write what contenders load into `folder`, which is empty or absent.

    Parameters
    ----------
    model
        "demo", a folder, a Hub id; "tiny"; "random:" and one of `SHAPES`.
    dtype
        "float32", "bfloat16" or "float16"; the device's own choice if it isn't said.
    bits
        Quantise to so many.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if model.startswith("random:"):
        _write_recipe(model.removeprefix("random:"), folder, dtype, bits)
    elif model == "tiny":
        from ..models import make_folder

        make_folder(folder)
        _never_ends(folder)
    else:
        _take_over(model, folder, dtype, bits)


def _write_recipe(shape: str, folder: Path, dtype: str | None, bits: int | None) -> None:
    config = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "eos_token_id": 0,
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    recipe = {"dtype": dtype or _native_dtype(), "bits": bits, "seed": 1}
    (folder / RECIPE).write_text(json.dumps(recipe))
    _write_tokenizer(folder, config["vocab_size"])


def _native_dtype() -> str:
    import mlx.core as mx

    return "float32" if mx.default_device().type == mx.DeviceType.cpu else "bfloat16"


def _write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level tokenizer with a word for every id the model can write; most are never read from a text."""
    from ..models import make_tokenizer

    tokenizer = json.loads(make_tokenizer().to_str())
    vocabulary = tokenizer["model"]["vocab"]
    number = len(vocabulary)
    while number < size:
        word, rest = "\u0120", number
        while rest:
            rest, letter = divmod(rest, len(LETTERS))
            word += LETTERS[letter]
        vocabulary.setdefault(word + "~", number)
        number += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _take_over(model: str, folder: Path, dtype: str | None, bits: int | None) -> None:
    from mlx_nb.backends import cpu_blas

    cpu_blas.prepare()
    from mlx_nb.backends import loader, sources

    source = sources.fetch(sources.resolve(model))
    emulated = loader.half_precision_is_emulated()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    wanted = dtype or ("float32" if emulated else None)
    as_it_is = bits is None and "quantization" not in config and wanted in {None, config.get("torch_dtype")}
    for file in source.iterdir():
        if file.is_file() and (as_it_is or not file.name.startswith("model")):
            (folder / file.name).symlink_to(file.resolve())
    if not as_it_is:
        _rewrite(source, folder, wanted, bits)
    _never_ends(folder)


def _rewrite(source: Path, folder: Path, dtype: str | None, bits: int | None) -> None:
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model, load_model, quantize_model, save_config, save_model

    model, config = load_model(source, lazy=True)
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
        model = dequantize_model(model)
        model.set_dtype(getattr(mx, dtype))
        config["torch_dtype"] = dtype
        for key in ("quantization", "quantization_config"):
            config.pop(key, None)
    if bits is not None:
        model, config = quantize_model(model, config, GROUP, bits)
    save_model(folder, model)
    (folder / "config.json").unlink()
    save_config(config, folder / "config.json")


def _never_ends(folder: Path) -> None:
    """Give the model an end token that it won't write: the last special one, or a new one that has no row."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ends = config.get("eos_token_id")
    ends = set(ends if isinstance(ends, list) else [ends])
    unused = [name for name, number in special.items() if number not in ends and "im_" not in name]
    name = unused[-1]
    _rewrite_json(folder / "config.json", config | {"eos_token_id": special[name]})
    path = folder / "tokenizer_config.json"
    _rewrite_json(path, json.loads(path.read_text(encoding="utf-8")) | {"eos_token": name})
    for file in ("generation_config.json", "special_tokens_map.json"):
        (folder / file).unlink(missing_ok=True)


def _rewrite_json(path: Path, content: dict[str, Any]) -> None:
    path.unlink()  # it may be a link to the model's own
    path.write_text(json.dumps(content), encoding="utf-8")


# -- loading one: in a contender's process ---------------------------------------------------------------


def is_recipe(folder: Path) -> bool:
    """Whether the weights are drawn and not read."""
    return (folder / RECIPE).exists()


def load(folder: Path) -> tuple[Any, Any]:
    """Return model and tokenizer as `mlx_lm.load` does."""
    import mlx_lm

    if not is_recipe(folder):
        model, tokenizer = mlx_lm.load(str(folder))[:2]
        return model, tokenizer
    from mlx_lm.tokenizer_utils import load as load_tokenizer

    return draw(folder), load_tokenizer(folder, eos_token_ids=[0])


def draw(folder: Path) -> Any:
    """Return the recipe's model."""
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = getattr(mx, recipe["dtype"])
    mx.random.seed(recipe["seed"])
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if value.ndim == 1:
            drawn = mx.ones(value.shape, dtype)
        else:
            drawn = mx.random.normal(value.shape, dtype) * mx.array(GAIN / math.sqrt(value.shape[-1]), dtype)
        mx.eval(drawn)  # one at a time, or the sum of them needs twice the memory
        weights.append((name, drawn))
    model.load_weights(weights)
    if recipe["bits"] is not None:
        nn.quantize(model, GROUP, recipe["bits"])
    model.eval()
    mx.eval(model.parameters())
    return model


def write_weights(folder: Path) -> None:
    """Turn a recipe into a plain folder, for contenders that load none but those."""
    from mlx_lm.utils import save_model

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    if recipe["bits"] is not None:
        config["quantization"] = {"group_size": GROUP, "bits": recipe["bits"]}
    save_model(folder, draw(folder))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / RECIPE).unlink()


def main(model: str, folder: str, dtype: str = "", bits: str = "", weights: str = "") -> None:
    """Make a subject ready."""
    make(model, Path(folder), dtype or None, int(bits) if bits else None)
    if weights and is_recipe(Path(folder)):
        write_weights(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
