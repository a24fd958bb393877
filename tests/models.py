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
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FAMILIES = (
    "llama", "llama3", "yarn", "qwen3", "qwen3_moe", "qwen3_5", "gemma3", "gpt_oss", "mamba2", "falcon_h1",
    "nemotron_h", "deepseek_v3",
)  # fmt: skip
Kind = Literal["plain", "thinks", "begins"]
WINDOW = 16
"""Sliding window of the families that have one."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS = "<|im_end|>"
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
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
_THINKING_TEMPLATE = (
    '{% if tools %}<|im_start|>system\nCall as <tool_call>{"name": …, "arguments": …}</tool_call>'
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': tool_call.name, 'arguments': tool_call.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_GAIN = 1.5  # smaller, and greedy answers settle on one token


_FALCON_MULTIPLIERS = (
    "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
    "lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
)  # fmt: skip


def make_tokenizer(kind: Kind = "plain") -> Tokenizer:
    """Byte-level BPE, so that any text has tokens and characters may span several.

    "thinks" has markers of reasoning and tool calls; "begins" puts a BOS before every text.
    """
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
    if kind == "thinks":
        tokenizer.add_tokens(list(_MARKERS))
    if kind == "begins":
        bos = (_SPECIAL[0], tokenizer.token_to_id(_SPECIAL[0]))
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos[0]} $A", None, [bos])
    return tokenizer


def make_folder(folder: Path, family: str = "llama", seed: int = 0, kind: Kind = "plain") -> Path:
    """Write a model of a family in mlx-lm's format."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": _EOS,
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _THINKING_TEMPLATE if kind == "thinks" else _CHAT_TEMPLATE,
    }
    if kind == "begins":
        settings |= {"bos_token": _SPECIAL[0], "chat_template": "{{ bos_token }}" + _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = _config(family, size, tokenizer.token_to_id(_EOS))
    (folder / "config.json").write_text(json.dumps(config))
    special = [tokenizer.token_to_id(token) for token in _SPECIAL]
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, seed, special))
    return folder


@functools.cache
def tiny_folder(family: str = "llama", seed: int = 0, kind: Kind = "plain") -> Path:
    """A model's folder, made once a session."""
    root = Path(tempfile.mkdtemp(prefix="mlx-nb-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return make_folder(root / family, family, seed, kind)


@functools.cache
def tiny(family: str = "llama", seed: int = 0, kind: Kind = "plain") -> tuple[Any, Any]:
    """Model and tokenizer as `mlx_lm.load` returns them, loaded once a session."""
    import mlx_lm

    return mlx_lm.load(str(tiny_folder(family, seed, kind)))


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
        "yarn": {
            "model_type": "qwen3",
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        },
        # Two of eight experts in every layer.
        "qwen3_moe": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
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
        # State space and attention side by side in each layer.
        "falcon_h1": {
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": True,
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
            **dict.fromkeys(_FALCON_MULTIPLIERS, 1.0),
        },
        # State space (M), attention (*) and MLP (-) layers; the last kind has no cache.
        "nemotron_h": {
            "hybrid_override_pattern": list("M*-M*-"),
            "num_hidden_layers": 6,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "tie_word_embeddings": False,
            **dict.fromkeys(("mamba_proj_bias", "attention_bias", "mlp_bias", "use_bias"), False),
        },
        # Latent attention; a dense layer, then experts with a shared one.
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "tie_word_embeddings": False,
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
