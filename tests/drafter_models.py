"""Tiny drafters for the tiny models that see, one of each kind, as folders that are loaded by name.

Random ones guess wrongly; the agreeable ones say what their target says, which then is a model that counts (each
token is followed by the one after it in the vocabulary) or one that always says token 0.
"""

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from models import tiny_folder
from vlm_models import tiny_vlm_folder

KINDS = {"heads": "mtp", "mtp": "mtp", "eagle3": "eagle3", "dflash": "dflash", "assistant": "mtp"}
"""Drafters by name, and the kind that mlx-vlm calls each."""
_GAIN = 1.5


def family_of(drafter: str) -> str:
    """The target's."""
    return "gemma4" if drafter == "assistant" else "qwen3_5"


@functools.cache
def tiny_pair(drafter: str, *, agreeable: bool = False) -> tuple[Path, Path]:
    """The folders of a target and its drafter; those of "heads" are one."""
    root = Path(tempfile.mkdtemp(prefix="mlx-nb-tiny-drafter-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target, own = root / "target", root / drafter
    shutil.copytree(tiny_vlm_folder(family_of(drafter)), target)
    if agreeable:
        _change(target, _count if drafter in ("heads", "mtp") else _mute)
    config = _config(drafter, _text(target))
    weights = _weights(config)
    if agreeable:
        (_count_by_heads if drafter in ("heads", "mtp") else _mute)(weights)
    if drafter == "heads":
        _add_heads(target, weights)
        return target, target
    own.mkdir()
    (own / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(own / "model.safetensors"), weights)
    return target, own


@functools.cache
def nemotron_with_heads() -> Path:
    """A text model that comes with prediction heads."""
    root = Path(tempfile.mkdtemp(prefix="mlx-nb-tiny-nemotron-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    target = root / "target"
    shutil.copytree(tiny_folder("nemotron_h"), target)
    config = json.loads((target / "config.json").read_text())
    config |= {"mtp_hybrid_override_pattern": ["*"], "num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    heads = _weights({"model_type": "nemotron_h_mtp", "text_config": config})
    mx.save_safetensors(
        str(target / "model-heads.safetensors"), {f"mtp.{name}": value for name, value in heads.items()}
    )
    return target


def _text(folder: Path) -> dict[str, Any]:
    text: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return text


def _config(drafter: str, text: dict[str, Any]) -> dict[str, Any]:
    attention = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    size = {
        name: text[name] for name in (*attention, "rms_norm_eps", "rope_theta", "max_position_embeddings")
    }
    match drafter:
        case "eagle3":
            layer = {**size, "model_type": "llama", "num_hidden_layers": 1, "head_dim": 16}
            ids = {"target_layer_ids": [1, 2, 4], "block_size": 4}
            return {
                "model_type": "eagle3",
                "transformer_layer_config": layer,
                "draft_vocab_size": text["vocab_size"],
                **ids,
            }
        case "dflash":
            ids = {"mask_token_id": 1, "target_layer_ids": [0, 2], "num_target_layers": 4}
            block = {"block_size": 5, "num_hidden_layers": 2, "head_dim": 16, "dflash_config": ids}
            return {**size, **block, "model_type": "qwen3"}
        case "assistant":
            layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
            layers |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0}
            own = {"backbone_hidden_size": text["hidden_size"], "block_size": 4}
            return {"model_type": "gemma4_assistant", "text_config": {**text, **layers}, **own}
        case _:
            text = {**text, "mtp_num_hidden_layers": 1}
            return {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 4}


def _weights(config: dict[str, Any]) -> dict[str, mx.array]:
    from mlx_vlm.utils import get_model_and_args

    family, _ = get_model_and_args(json.loads(json.dumps(config)))
    mx.random.seed(5)
    model = family.Model(family.ModelConfig.from_dict(json.loads(json.dumps(config))))
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        noise = mx.random.normal(value.shape)
        scale = 0.1 if value.ndim <= 1 else _GAIN / math.sqrt(value.shape[-1])
        weights[name] = (value + scale * noise if value.ndim <= 1 else scale * noise).astype(mx.float32)
    return weights


def _add_heads(target: Path, weights: dict[str, mx.array]) -> None:
    """As checkpoints have them that were not converted: their norms are stored as what is beyond 1."""
    norms = {name for name, value in weights.items() if value.ndim == 1 and "norm" in name}
    stored = {f"mtp.{name}": value - 1 if name in norms else value for name, value in weights.items()}
    mx.save_safetensors(str(target / "model-heads.safetensors"), stored)
    config = json.loads((target / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (target / "config.json").write_text(json.dumps(config))


def _change(folder: Path, change: Callable[[dict[str, mx.array]], None]) -> None:
    file = str(folder / "model.safetensors")
    weights = dict(mx.load(file))
    change(weights)
    mx.eval(weights)
    if "language_model.lm_head.weight" in weights:
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = False
        (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(file, weights)


def _count(weights: dict[str, mx.array]) -> None:
    """Have no layer add anything, and a head that knows each token by its predecessor's embedding."""
    _pass_through(weights)
    embeddings = weights["language_model.model.embed_tokens.weight"]
    directions = embeddings / mx.linalg.norm(embeddings, axis=1, keepdims=True)
    weights["language_model.lm_head.weight"] = mx.roll(directions, 1, axis=0)
    weights["language_model.model.norm.weight"] = mx.ones(embeddings.shape[1])


def _count_by_heads(weights: dict[str, mx.array]) -> None:
    """Go by the last token alone."""
    _pass_through(weights)
    size = weights["fc.weight"].shape[0]
    weights["fc.weight"] = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    weights["pre_fc_norm_embedding.weight"] = weights["norm.weight"] = mx.ones(size)


def _pass_through(weights: dict[str, mx.array]) -> None:
    for name, value in weights.items():
        if "vision" not in name and name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(value)


def _mute(weights: dict[str, mx.array]) -> None:
    """Say token 0 whatever was said."""
    for name in ("language_model.model.norm.weight", "model.norm.weight", "norm.weight"):
        if name in weights:
            weights[name] = mx.zeros_like(weights[name])
