"""Whether a model fits this machine, said before it is fetched or loaded.

Weights and KV cache are held against memory, files against the disk. Sizes are estimates from config.json and
the sizes of the weights' files; what is exact (the arrays themselves) the loader and the backend check again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import ModelLoadError

__all__ = [
    "Needs",
    "config_of",
    "device_memory",
    "host_memory",
    "needs",
    "needs_of",
    "precision",
    "precision_of",
    "require_disk",
    "require_memory",
    "size",
    "smaller",
]

LEAST_CONTEXT = 2048
"""Tokens that a model must have room for, to be worth loading."""

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SIZE_IN_NAME = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([bm])(?![A-Za-z0-9])", re.IGNORECASE)
_BITS_IN_NAME = re.compile(r"(\d)-?bit", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory that a model takes; `kv` is for one request of `tokens` tokens."""

    weights: int
    kv: int
    tokens: int
    precision: str

    @property
    def total(self) -> int:
        """Bytes."""
        return self.weights + self.kv


def needs(config: Mapping[str, Any], stored: int, *, float32: bool) -> Needs:
    """Estimate what a model takes in memory.

    Parameters
    ----------
    config
        Its config.json.
    stored : int
        Bytes of its weights' files.
    float32 : bool
        Whether loading makes the weights float32, as on a CPU.
    """
    text = _text_part(config)
    context = text.get("max_position_embeddings")
    tokens = min(LEAST_CONTEXT, context) if _is_count(context) else LEAST_CONTEXT
    bits = _stored_bits(config)
    return Needs(
        weights=int(stored * 32 / bits) if float32 else stored,
        kv=_kv_numbers(text) * (4 if float32 else 2) * tokens,
        tokens=tokens,
        precision="float32" if float32 else precision(config),
    )


def needs_of(folder: Path, *, float32: bool) -> Needs | None:
    """`needs` of a folder in mlx-lm's format, counted from the headers of its weights; None if it has none."""
    files, config = sorted(folder.glob("model*.safetensors")), config_of(folder)
    if not files or config is None:
        return None
    try:
        estimate = needs(config, sum(file.stat().st_size for file in files), float32=float32)
        if float32:
            numbers = sum(_numbers(file, _quantization(config)) for file in files)
            estimate = replace(estimate, weights=4 * numbers)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # loading says what is wrong with the folder
    return estimate


def config_of(folder: Path) -> dict[str, Any] | None:
    """A folder's config.json; None if there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _numbers(file: Path, quantization: Mapping[str, Any] | None) -> int:
    """How many weights a safetensors file holds, packed ones counted singly."""
    count = 0.0
    for name, tensor in _header(file).items():
        if quantization and name.endswith((".scales", ".biases")):
            continue
        packed = quantization is not None and tensor["dtype"] == "U32"
        count += math.prod(tensor["shape"]) * (32 / quantization["bits"] if packed and quantization else 1)
    return int(count)


def _header(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def precision_of(folder: Path) -> str:
    """`precision` of a folder in mlx-lm's format, by its weights if config.json doesn't say."""
    said = precision(config_of(folder) or {})
    file = next(iter(sorted(folder.glob("model*.safetensors"))), None)
    if said or file is None:
        return said
    try:
        found = Counter(tensor["dtype"] for tensor in _header(file).values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return _DTYPES.get(found.most_common(1)[0][0], "") if found else ""


def precision(config: Mapping[str, Any]) -> str:
    """What the weights are stored as: "4-bit", "bfloat16" …; empty if config.json doesn't say."""
    quantization = _quantization(config)
    if quantization:
        return f"{quantization['bits']}-bit"
    for part in (config, _text_part(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return str(part[key]).removeprefix("torch.")
    return ""


def require_memory(name: str, needed: Needs, share: float) -> None:
    """Raise ModelLoadError if a model takes more than `share` of the device's memory."""
    limit = int(share * device_memory())
    if needed.total <= limit:
        return
    weights = f"{size(needed.weights)} of weights{f' in {needed.precision}' if needed.precision else ''}"
    kv = f", {size(needed.kv)} of KV cache for {needed.tokens:,} tokens" if needed.kv else ""
    advice = _try(name, limit, float32=needed.precision == "float32")
    raise ModelLoadError(
        f"{name} needs about {size(needed.total)} of memory ({weights}{kv}) and the engine may use "
        f"{size(limit)}: {advice}."
    )


def require_disk(name: str, needed: int, folder: Path, setting: str, *, float32: bool = False) -> None:
    """Raise ModelLoadError if `folder`'s disk has no room for so many bytes more."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed <= free:
        return
    raise ModelLoadError(
        f"{name} takes {size(needed)} on disk and {there} has {size(free)} left: free some, "
        f"let {setting} name a folder on another disk, or {_try(name, free, float32=float32)}."
    )


def device_memory() -> int:
    """Bytes that the device may use: what the device says, else the machine's or the container's memory."""
    import mlx.core as mx

    info = mx.device_info()
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        found = info.get(key)
        if isinstance(found, int) and found > 0:
            return found
    return host_memory()


def host_memory() -> int:
    """Bytes of the machine's memory, or of the container's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total


def smaller(name: str, limit: int, *, float32: bool) -> tuple[str, int] | None:
    """The largest model with a built-in alias that fits `limit` bytes, of the same family if there is one.

    Returns its alias and about how many bytes it takes.
    """
    from .sources import BUILT_IN

    family = _family(name)
    most = _bytes_by_name(name, float32=float32)
    fitting = []
    for alias, repo in BUILT_IN.items():
        takes = _bytes_by_name(repo, float32=float32)
        if takes and takes <= 0.8 * limit and repo != name and (most is None or takes < most):
            fitting.append((_family(repo) == family, takes, alias))
    if not fitting:
        return None
    _, takes, alias = max(fitting)
    return alias, takes


def size(count: float) -> str:
    """Bytes for people: "1.2 GB"."""
    if count >= 1e9:
        return f"{count / 1e9:,.1f} GB"
    return f"{count / 1e6:,.0f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def _try(name: str, limit: int, *, float32: bool) -> str:
    found = smaller(name, limit, float32=float32)
    return f"try {found[0]} (about {size(found[1])})" if found else "choose a smaller model"


def _family(name: str) -> str:
    """The letters that a model's own name begins with: "qwen" of mlx-community/Qwen3-8B-4bit."""
    match = re.match(r"[a-z]+", name.rpartition("/")[2].lower())
    return match[0] if match else ""


def _bytes_by_name(name: str, *, float32: bool) -> int | None:
    """About what a model takes in memory, by the number of parameters and of bits in its name."""
    count = _SIZE_IN_NAME.search(name.rpartition("/")[2])
    if count is None:
        return None
    bits = _BITS_IN_NAME.search(name)
    width = 32.0 if float32 else int(bits[1]) + 0.5 if bits else 16.0
    return int(float(count[1]) * (1e9 if count[2] in "bB" else 1e6) * width / 8)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a config.json describes the language model."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = config.get("quantization") or config.get("quantization_config")
    return found if isinstance(found, dict) and _is_count(found.get("bits")) else None


def _stored_bits(config: Mapping[str, Any]) -> float:
    """Bits a weight on disk, a scale and a bias for each group included."""
    quantization = _quantization(config)
    if quantization is None:
        return _BITS.get(precision(config), 16)
    group = quantization.get("group_size")
    bits = float(quantization["bits"])
    return bits + (32 / group if isinstance(group, int) and group > 0 else 0)


def _kv_numbers(text: Mapping[str, Any]) -> int:
    """Keys and values of one token in all layers; 0 if config.json doesn't say."""
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    if not (_is_count(layers) and _is_count(heads)):
        return 0
    groups = text.get("num_key_value_heads")
    width = text.get("head_dim")
    if not _is_count(width):
        hidden = text.get("hidden_size")
        width = hidden // heads if _is_count(hidden) else 0
    return int(2 * layers * (groups if _is_count(groups) else heads) * width)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
