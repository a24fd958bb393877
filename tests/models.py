"""Tiny random models for tests: real architectures and a real byte-level BPE tokenizer, a few seconds in all.

Weights are drawn so that greedy answers stay varied and don't end by themselves.
"""

import atexit
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "llama3", "qwen3", "qwen3_5", "gemma3", "gpt_oss", "mamba2")
WINDOW = 16
"""Sliding window of the families that have one."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS = "<|im_end|>"
_CORPUS = (
    "A tiny tokenizer learns from a tiny corpus of words and numbers.",
    "def double(number):\n    return 2 * number\n",
    '{"name": "Ada", "born": 1815, "tags": ["poet", "engine"], "known": true}',
    "Sphinx of black quartz, judge my vow. 0123456789",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GAIN = 1.5  # smaller, and greedy answers settle on one token


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE, so that any text has tokens and characters may span several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    return tokenizer


def make_folder(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """Write a model of a family in mlx-lm's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = _config(family, size, tokenizer.token_to_id(_EOS))
    (folder / "config.json").write_text(json.dumps(config))
    special = [tokenizer.token_to_id(token) for token in _SPECIAL]
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, seed, special))
    return folder


@functools.cache
def tiny_folder(family: str = "llama", seed: int = 0) -> Path:
    """A model's folder, made once a session."""
    root = Path(tempfile.mkdtemp(prefix="mlx-nb-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_folder(root / family, family, seed)


@functools.cache
def tiny(family: str = "llama", seed: int = 0) -> tuple[Any, Any]:
    """Model and tokenizer as `mlx_lm.load` returns them, loaded once a session."""
    import mlx_lm

    return mlx_lm.load(str(tiny_folder(family, seed)))


def _weights(config: dict[str, Any], seed: int, quiet: list[int]) -> dict[str, mx.array]:
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    weights = {}
    for name, value in tree_flatten(model_class(args_class.from_dict(config)).parameters()):
        noise = mx.random.normal(value.shape)
        embedding = name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight"))
        if value.ndim <= 1:
            drawn = value + 0.1 * noise
        elif embedding and "head" not in name:
            drawn = 0.5 * noise / math.sqrt(value.shape[-1])
        else:
            inputs = math.prod(value.shape[1:]) if "conv" in name else value.shape[-1]
            drawn = _GAIN * noise / math.sqrt(inputs)
        if embedding:
            drawn[mx.array(quiet)] *= 0.1
        weights[name] = drawn.astype(mx.float32)
    return weights


def _config(family: str, vocabulary: int, eos: int) -> dict[str, Any]:
    base = {
        "model_type": family,
        "vocab_size": vocabulary,
        "eos_token_id": eos,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    changes: dict[str, dict[str, Any]] = {
        "llama": {},
        # Its frequencies lie in an array that parameters() leaves out.
        "llama3": {
            "model_type": "llama",
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        "qwen3": {},
        # Sliding and global attention in turn.
        "gemma3": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
            "rope_local_base_freq": 10000.0,
        },
        # Attention sinks, sliding and full attention in turn, experts.
        "gpt_oss": {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": False,
        },
        # State space only: no attention at all.
        "mamba2": {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": "auto",
        },
    }
    if family == "qwen3_5":  # linear and full attention in turn
        text = {
            **base,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        }
        return {"model_type": family, "eos_token_id": eos, "tie_word_embeddings": True, "text_config": text}
    return base | changes[family]
