"""A GGUF file to a folder in mlx-lm's format.

Owns what GGUF and mlx-lm say differently of a model: tensor names, the row order of Llama's queries and
keys, Gemma's norm offset, block quantisation and rotary settings. Families: Llama (Mistral files among
them), Qwen 2, Qwen 3 and Gemma 3, text only. What could only be converted by guesswork is refused by name:
another architecture, a tensor without a place, an unknown rotary scaling.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError
from ..outputs import LoadProgress
from . import cpu_blas
from .gguf_tokenizer import write_tokenizer

if TYPE_CHECKING:
    import mlx.core as mx
    from gguf import GGUFReader, ReaderTensor

__all__ = ["FAMILIES", "convert", "converted_size"]

Array = npt.NDArray[Any]

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")

_GROUP = 32  # weights that share a scale, in Q4_0, Q4_1 and Q8_0 alike
_KEPT_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_SHARD_BYTES = 2 * 2**30


def convert(
    gguf_path: str | Path,
    out_dir: str | Path,
    *,
    keep_quantized: bool,
    dtype: str | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Path:
    """Write what ``mlx_lm.load`` reads; the folder appears whole or not at all.

    Parameters
    ----------
    gguf_path
        One file; a split one must be merged first.
    out_dir
        The folder to make. One that another process completes first is left as it is.
    keep_quantized
        Keep Q4_0, Q4_1 and Q8_0 as they are, bit for bit, in MLX's affine layout. What else is quantised
        (the K-quants …) is dequantised to `dtype` either way.
    dtype : {"float32", "float16", "bfloat16"} or None
        Of everything that isn't kept quantised, and of scales. None: what the file's own numbers need.

    Returns
    -------
    Path
        `out_dir`.

    Raises
    ------
    ModelLoadError
        The file is damaged, or of a kind that isn't supported.
    """
    cpu_blas.prepare()
    source, out = Path(gguf_path), Path(out_dir)
    file = _File.open(source)
    dtype = dtype or file.natural_dtype
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        config = _config(file)
        config |= write_tokenizer(source.name, file.metadata, config["max_position_embeddings"], work)
        quantization = _write_weights(
            file, work, keep_quantized=keep_quantized, dtype=dtype, progress=progress
        )
        config["dtype"] = dtype
        if quantization:
            config["quantization"] = quantization
        (work / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        _publish(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def converted_size(gguf_path: str | Path, *, keep_quantized: bool, dtype: str | None = None) -> int:
    """About how many bytes `convert` would write, with the same arguments."""
    file = _File.open(Path(gguf_path))
    width = 4 if (dtype or file.natural_dtype) == "float32" else 2
    return sum(
        int(tensor.n_bytes)
        if keep_quantized and tensor.tensor_type.name in _KEPT_BITS
        else int(tensor.n_elements) * width
        for tensor in file.tensors.values()
    )


def _publish(work: Path, out: Path) -> None:
    work.chmod(0o755)  # mkdtemp's folders are for their owner only
    try:
        work.rename(out)
    except OSError:
        if not (out / "config.json").exists():
            raise


# The file


@dataclass(frozen=True)
class _File:
    """A GGUF file's metadata as plain values, and its tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    architecture: str

    @classmethod
    def open(cls, path: Path) -> _File:
        if not path.is_file():
            raise ModelLoadError(f"There is no file {path}.")
        reader = _read(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        architecture = metadata.get("general.architecture")
        if architecture not in FAMILIES:
            raise ModelLoadError(
                f"{path.name} is of architecture {architecture!r}, which can't be converted: "
                f"choose a {', '.join(FAMILIES[:-1])} or {FAMILIES[-1]} file, or the model in MLX's format."
            )
        if (parts := metadata.get("split.count") or 1) > 1:
            raise ModelLoadError(
                f"{path.name} is one of {parts} parts: join them (llama-gguf-split --merge)."
            )
        if metadata.get(f"{architecture}.expert_count"):
            raise ModelLoadError(f"{path.name} is a mixture of experts, which can't be converted from GGUF.")
        return cls(path, metadata, {tensor.name: tensor for tensor in reader.tensors}, architecture)

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of the architecture: ``get("block_count")`` is ``llama.block_count``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path.name} lacks {self.architecture}.{key}: it is incomplete.")
        return value

    @property
    def heads(self) -> int:
        return int(self.need("attention.head_count"))

    @property
    def kv_heads(self) -> int:
        return int(self.get("attention.head_count_kv", self.heads))

    @property
    def head_dim(self) -> int:
        return int(self.get("attention.key_length") or self.need("embedding_length") // self.heads)

    @property
    def natural_dtype(self) -> str:
        """The half precision that holds this file's numbers: Gemma's activations overflow float16."""
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        return "bfloat16" if self.architecture == "gemma3" or "BF16" in kinds else "float16"


def _read(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    except (ValueError, LookupError, OSError, ArithmeticError, MemoryError) as error:
        raise ModelLoadError(f"{path.name} is no GGUF file, or damaged ({error}): fetch it again.") from error
    if end > path.stat().st_size:
        raise ModelLoadError(f"{path.name} is cut short: fetch it again.")
    if reader.byte_order != "I":
        raise ModelLoadError(f"{path.name} has this machine's byte order reversed: fetch the usual version.")
    return reader


# config.json


def _config(file: _File) -> dict[str, Any]:
    embeddings = file.tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelLoadError(f"{file.path.name} has no token_embd.weight: it is incomplete.")
    hidden = int(file.need("embedding_length"))
    rotated = file.get("rope.dimension_count", file.head_dim)
    if rotated != file.head_dim:
        raise ModelLoadError(
            f"{file.path.name} rotates {rotated} of the {file.head_dim} dimensions of a head, "
            f"which mlx-lm's {file.architecture} can't."
        )
    config = {
        "model_type": {"gemma3": "gemma3_text"}.get(file.architecture, file.architecture),
        "hidden_size": hidden,
        "num_hidden_layers": int(file.need("block_count")),
        "intermediate_size": int(file.need("feed_forward_length")),
        "num_attention_heads": file.heads,
        "num_key_value_heads": file.kv_heads,
        "head_dim": file.head_dim,
        "rms_norm_eps": float(file.need("attention.layer_norm_rms_epsilon")),
        "vocab_size": int(embeddings.shape[1]),
        "max_position_embeddings": int(file.need("context_length")),
        "rope_theta": float(file.get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if scaling := _rope_scaling(file):
        config["rope_scaling"] = scaling
    if file.architecture == "gemma3":
        # The scale isn't in the file. Of the published sizes only the 27B (62 layers) uses hidden / heads.
        whole = config["num_hidden_layers"] == 62
        config["query_pre_attn_scalar"] = hidden / file.heads if whole else file.head_dim
        config["sliding_window"] = int(file.need("attention.sliding_window"))
        config["sliding_window_pattern"] = 6
        config["rope_local_base_freq"] = float(file.get("rope.freq_base_swa", 10_000.0))
    return config


def _rope_scaling(file: _File) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file)
    kind = file.get("rope.scaling.type", "none")
    factor = file.get("rope.scaling.factor")
    if kind == "none" or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = int(file.need("rope.scaling.original_context_length"))
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    raise ModelLoadError(f"{file.path.name} has rotary scaling {kind!r}, which can't be converted.")


def _llama3_scaling(file: _File) -> dict[str, Any]:
    """The Llama 3.1 rule that a table of frequency factors came from; GGUF keeps only the table."""
    table = np.asarray(file.tensors["rope_freqs.weight"].data, dtype=np.float32).ravel()
    context, low, high, factor = 8192, 1.0, 4.0, float(table.max())
    base = float(file.get("rope.freq_base", 10_000.0))
    turns = context / (2 * math.pi * base ** (np.arange(0, file.head_dim, 2) / file.head_dim))
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if expected.shape != table.shape or not np.allclose(expected, table, rtol=1e-3):
        raise ModelLoadError(f"{file.path.name} has rotary frequency factors that are not Llama 3's.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


# Weights

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK_NAMES = _BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _write_weights(
    file: _File,
    folder: Path,
    *,
    keep_quantized: bool,
    dtype: str,
    progress: Callable[[LoadProgress], None] | None,
) -> dict[str, Any]:
    """Write the shards and their index; returns config.json's quantisation entry, empty if there is none."""
    import mlx.core as mx

    total = sum(tensor.n_bytes for tensor in file.tensors.values())
    kept: dict[str, int] = {}
    index: dict[str, str] = {}
    shard: dict[str, mx.array] = {}
    done = 0

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        mx.save_safetensors(str(folder / name), shard, metadata={"format": "mlx"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in _named(file):
        module = name.rpartition(".")[0]
        kind = tensor.tensor_type.name
        if keep_quantized and kind in _KEPT_BITS and len(tensor.shape) == 2:
            weight, scales, biases = _affine(_in_order(file, tensor), kind)
            shard[f"{module}.weight"] = mx.array(weight)
            shard[f"{module}.scales"] = _cast(scales, dtype)
            shard[f"{module}.biases"] = _cast(biases, dtype)
            kept[module] = _KEPT_BITS[kind]
        else:
            shard[name] = _cast(_dequantized(file, tensor), dtype)
        mx.eval(list(shard.values()))
        done += tensor.n_bytes
        if progress:
            progress(LoadProgress("convert", f"Converting {file.path.name}", done / total))
        if sum(array.nbytes for array in shard.values()) > _SHARD_BYTES:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}, indent=1), encoding="utf-8"
    )
    if not kept:
        return {}
    usual = max(set(kept.values()), key=list(kept.values()).count)
    return {
        "group_size": _GROUP,
        "bits": usual,
        **{module: {"group_size": _GROUP, "bits": bits} for module, bits in kept.items() if bits != usual},
    }


def _named(file: _File) -> Iterator[tuple[str, ReaderTensor]]:
    """Tensors under mlx-lm's names."""
    blocks = _GEMMA_BLOCK_NAMES if file.architecture == "gemma3" else _BLOCK_NAMES
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":  # in config.json, as rope_scaling
            continue
        stem, _, leaf = name.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = blocks.get(block[2]) if block else _NAMES.get(stem)
        if part is None or leaf not in {"weight", "bias"}:
            raise ModelLoadError(f"{file.path.name}: {file.architecture} has no place for its tensor {name}.")
        yield f"model.layers.{block[1]}.{part}.{leaf}" if block else f"{part}.{leaf}", tensor


def _in_order(file: _File, tensor: ReaderTensor) -> Array:
    """Raw rows in mlx-lm's order.

    Llama files interleave the two halves of every query and key head, for rotary embeddings over neighbours.
    """
    rows: Array = tensor.data
    heads = {"attn_q": file.heads, "attn_k": file.kv_heads}.get(tensor.name.split(".")[-2])
    if file.architecture != "llama" or heads is None:
        return rows
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _dequantized(file: _File, tensor: ReaderTensor) -> Array:
    from gguf.quants import dequantize

    try:
        values: Array = dequantize(_in_order(file, tensor), tensor.tensor_type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{file.path.name} has {tensor.tensor_type.name} weights, which can't be read: choose Q4_K_M."
        ) from error
    if file.architecture == "gemma3" and tensor.name.endswith("norm.weight"):
        values = values - np.float32(1)  # GGUF stores 1 + weight
    return values


def _affine(rows: Array, kind: str) -> tuple[Array, Array, Array]:
    """Blocks of 32 as MLX packs them: 32-bit words, lowest bits first; a weight is scale * q + bias."""
    header = 4 if kind == "Q4_1" else 2  # float16 scale, and for Q4_1 float16 minimum
    blocks = rows.reshape(len(rows), -1, header + _GROUP * _KEPT_BITS[kind] // 8)
    head = np.ascontiguousarray(blocks[..., :header]).view(np.float16)
    scale = head[..., 0].astype(np.float32)
    packed = blocks[..., header:]
    if kind == "Q8_0":
        packed, bias = packed ^ np.uint8(0x80), scale * -128  # signed to unsigned
    else:
        # The low half-bytes are weights 0 to 15, the high ones 16 to 31; MLX wants neighbours in a byte.
        q = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
        packed = q[..., 0::2] | q[..., 1::2] << 4
        bias = head[..., 1].astype(np.float32) if kind == "Q4_1" else scale * -8
    words = np.ascontiguousarray(packed).reshape(len(rows), -1).view("<u4")
    return words, scale, bias


def _cast(values: Array, dtype: str) -> mx.array:
    import mlx.core as mx

    return mx.array(values).astype(getattr(mx, dtype))
