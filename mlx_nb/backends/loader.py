"""A folder of weights to a model that is ready to step, on the thread that will step it.

Owns the precision policy (checkpoint precision on Metal and CUDA; float32 where half precision is emulated),
the fingerprint that saved caches carry, and the translation of every way a folder can be broken into one
line. It refuses to fetch anything: paths only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelLoadError
from ..outputs import LoadProgress
from . import cpu_blas
from .vision_files import read_revealing_model, read_vision_model, sees
from .vision_inputs import MediaReader

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx import nn

__all__ = [
    "LoadedModel",
    "content_key",
    "device_name",
    "evaluate",
    "half_precision_is_emulated",
    "leave_thread",
    "load",
    "settle",
]

logger = logging.getLogger("mlx_nb")

_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_SAMPLES, _SAMPLE_BYTES = 32, 64 * 1024


@dataclass(frozen=True)
class LoadedModel:
    """A model with every array evaluated, and what people and caches need to know of it.

    Attributes
    ----------
    tokenizer
        mlx-lm's TokenizerWrapper.
    fingerprint : str
        Equal for equal weights, tokenizer, adapter and precision, wherever the files lie.
    precision : str
        "float32", "bfloat16", "4-bit" …, of the largest share of the weights.
    weight_bytes : int
        Bytes in memory.
    context_length : int or None
        Tokens; None if the model doesn't say.
    backend : str
        For people: "MLX 0.32.4, CPU + OpenBLAS".
    notes : tuple of str
        What was done to the model on the way, a line each.
    reader : MediaReader, optional
        For prompts with pictures; `model` is then a `Sighted`.
    """

    model: nn.Module
    tokenizer: Any
    path: Path
    fingerprint: str
    precision: str
    weight_bytes: int
    context_length: int | None
    backend: str
    notes: tuple[str, ...] = ()
    reader: MediaReader | None = None


def load(
    path: str | Path,
    *,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    text_only: bool = False,
    reveals: bool = False,
    on_progress: Callable[[LoadProgress], None] | None = None,
) -> LoadedModel:
    """Load a folder in the format of mlx-lm, or of mlx-vlm if it has all that pictures take.

    Parameters
    ----------
    path
        Folder with config.json, safetensors and tokenizer files.
    adapter_path
        Folder of a LoRA, DoRA or full fine-tune made by ``mlx_lm.lora``.
    trust_remote_code
        Let the folder's own Python files run.
    text_only
        Leave out what a model that sees has for it. So it is with an adapter: mlx-lm's know the text part alone.
    reveals
        Take mlx-vlm's model, whether it sees or not: a `Sighted`, which shows drafters what it computes.

    Raises
    ------
    ModelLoadError
        One line that says what is wrong with the folder and what to do; the original is its cause.
    """
    path = Path(path).expanduser()
    report = on_progress or (lambda _: None)
    _check_folder(path)
    _check_adapter(adapter_path)
    _prepare_mlx()

    report(LoadProgress("load", f"Loading {path.name}", None))
    config = _read_config(path)
    processor = None
    if adapter_path is None and not text_only and sees(path, config):
        model, processor = read_vision_model(path, trust_remote_code)
    elif reveals:
        model = read_revealing_model(path, trust_remote_code)
    else:
        model, config = _read_model(path, config, trust_remote_code)
    notes = _to_float32(model) if half_precision_is_emulated() else []
    if adapter_path is not None:
        model = _apply_adapter(model, Path(adapter_path).expanduser())
        notes.append(f"adapter {adapter_path}")
        if half_precision_is_emulated():
            _to_float32(model)
    _check_memory(path, model)
    try:
        evaluate(model)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(
            f"The weights in {path} can't be read: {_line(error)}. Fetch it again."
        ) from error
    tokenizer = _read_tokenizer(path, config, trust_remote_code)
    precision = _precision(model)
    weight_bytes = sum(array.nbytes for _, array in _parameters(model))
    reader = None
    if processor is not None:
        reader = MediaReader(processor, model.config)
        reader.lend_template(tokenizer)
    if processor is not None or reveals:
        from .vision import Sighted

        model = Sighted(model)
        notes += model.notes()

    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        path=path,
        fingerprint=_fingerprint(path, adapter_path, precision),
        precision=precision,
        weight_bytes=weight_bytes,
        context_length=_context_length(config),
        backend=device_name(),
        notes=tuple(notes),
        reader=reader,
    )
    report(LoadProgress("ready", f"{path.name} is loaded ({precision}, {loaded.backend})", 1.0))
    return loaded


def evaluate(model: nn.Module) -> None:
    """Evaluate every array of a model, on the thread that made it.

    ``parameters()`` leaves out arrays with a leading underscore, such as the frequencies of scaled rotary
    embeddings, and a lazy array can't be evaluated on another thread than the one that recorded it.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    # A module is a dict that holds its arrays and its parts, private ones included.
    mx.eval([value for _, value in tree_flatten(model) if isinstance(value, mx.array)])


def settle(model: nn.Module) -> None:
    """Bring a model beside the target into the precision that suits the device, every array evaluated."""
    if half_precision_is_emulated():
        _to_float32(model)
    evaluate(model)


def leave_thread() -> None:
    """Take this thread's streams from MLX, or the process may crash at exit. A thread's last act.

    What MLX has freed by then goes back to the system.
    """
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.clear_streams()
        mx.clear_cache()
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # glibc keeps the memory of most arrays otherwise: a model's worth


def half_precision_is_emulated() -> bool:
    """Whether float16 and bfloat16 are slower than float32 on the device MLX will use: true of CPUs."""
    _prepare_mlx()
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.cpu)


def content_key(*files: Path) -> str:
    """Hash of files by size and content, without reading gigabytes.

    Small files are read whole; of large ones the beginning (in a weights file, the header that lists its
    tensors), the end and evenly spread samples. Names, places and dates don't count.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            if size <= 2 * _SAMPLES * _SAMPLE_BYTES:
                digest.update(stream.read())
                continue
            for i in range(_SAMPLES):
                stream.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _prepare_mlx() -> None:
    try:
        cpu_blas.require_backend()
    except ImportError as error:
        raise ModelLoadError(str(error)) from error
    cpu_blas.prepare()


# What can be wrong with a folder


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ModelLoadError(
            f"There is no folder {path}: give a folder with config.json and safetensors files."
        )
    weights = sorted(path.glob("model*.safetensors"))
    if not (path / "config.json").exists():
        hint = _other_format(path) or "is it the right folder?"
        raise ModelLoadError(f"{path} has no config.json: {hint}")
    if not weights:
        hint = _other_format(path) or "fetch the model again, with its weights."
        raise ModelLoadError(f"{path} has no model*.safetensors: {hint}")
    for file in weights:
        with file.open("rb") as stream:
            if stream.read(24).startswith(b"version https://git-lfs"):
                raise ModelLoadError(
                    f"{file} is a Git LFS pointer, not weights: run `git lfs pull` in {path}."
                )
    missing = [name for name in _listed_shards(path) if not (path / name).exists()]
    if missing:
        raise ModelLoadError(
            f"{path} lacks {len(missing)} of its weights files ({missing[0]}): fetch it again."
        )
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise ModelLoadError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): fetch the model again."
        )


def _other_format(path: Path) -> str | None:
    if found := next(path.glob("*.gguf"), None):
        return f"give the file instead ({found})."
    if next(path.glob("*.bin"), None) or next(path.glob("*.pt*"), None):
        return "it holds PyTorch weights; convert them with `mlx_lm.convert`."
    return None


def _listed_shards(path: Path) -> Iterable[str]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return ()
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is damaged: {_line(error)}. Fetch the model again.") from error


def _check_adapter(adapter_path: str | Path | None) -> None:
    if adapter_path is None:
        return
    folder = Path(adapter_path).expanduser()
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).exists():
            raise ModelLoadError(f"{folder} is no adapter: it lacks {name}, which mlx_lm.lora writes.")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"{path / 'config.json'} is damaged ({_line(error)}): fetch it again."
        ) from error
    return config


def _read_model(
    path: Path, config: dict[str, Any], trust_remote_code: bool
) -> tuple[nn.Module, dict[str, Any]]:
    import mlx_lm
    from mlx_lm.utils import load_model

    model_type = config["model_type"]
    try:
        # Lazily: what the precision policy throws away is then never held in memory as a whole.
        model, config = load_model(path, lazy=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        if "model_file" in config and not trust_remote_code:
            problem = "runs Python code of its own: load it with trust_remote_code=True if you trust it"
        elif isinstance(error, ValueError) and "not supported" in str(error):
            known = f"mlx-lm {mlx_lm.__version__}"
            problem = f"is of type {model_type!r}, which {known} doesn't know: choose another model"
        elif isinstance(error, ValueError) and "parameters" in str(error):
            problem = f"has weights that don't fit its config.json ({_line(error)}): fetch it again"
        else:
            problem = f"can't be loaded ({_line(error)}): fetch it again, or choose another model"
        raise ModelLoadError(f"{path} {problem}.") from error
    return model, config


def _read_tokenizer(path: Path, config: dict[str, Any], trust_remote_code: bool) -> Any:
    from mlx_lm.utils import load_tokenizer

    try:
        return load_tokenizer(
            path, {"trust_remote_code": trust_remote_code}, eos_token_ids=config.get("eos_token_id")
        )
    except Exception as error:
        raise ModelLoadError(
            f"The tokenizer in {path} can't be read ({_line(error)}): fetch it again."
        ) from error


def _apply_adapter(model: nn.Module, folder: Path) -> nn.Module:
    from mlx_lm.utils import load_adapters

    try:
        model = load_adapters(model, str(folder))
    except Exception as error:
        raise ModelLoadError(
            f"The adapter in {folder} doesn't fit the model ({_line(error)}): was it trained on this one?"
        ) from error
    model.eval()
    return model


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


# Precision


def _to_float32(model: nn.Module) -> list[str]:
    """Dequantise and cast in place (lazily); says what changed."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    before = _precision(model)
    # Scales first, so that dequantising happens in float32 and loses nothing.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(mx.float32)
    if before == "float32":
        return []
    note = (
        f"{before} weights became float32: this CPU emulates half precision and is slow on quantised weights"
    )
    logger.info("%s.", note)
    return [note]


def _check_memory(path: Path, model: nn.Module) -> None:
    """Refuse what a CPU can't hold, before a single weight is read: swapping or being killed is worse."""
    if not half_precision_is_emulated():
        return  # GPUs have memory of their own, and MLX its limit
    needed = sum(array.nbytes for _, array in _parameters(model))
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.9 * present:
        raise ModelLoadError(
            f"{path.name} takes {needed / 1e9:.3g} GB in float32 and this computer's memory is "
            f"{present / 1e9:.3g} GB: choose a smaller model."
        )


def _parameters(model: nn.Module) -> Iterator[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    yield from tree_flatten(model.parameters())


def _precision(model: nn.Module) -> str:
    """What most bytes of the weights are: a bit width, or a dtype."""
    import mlx.core as mx

    share: Counter[str] = Counter()
    for _, module in model.named_modules():
        packed = f"{module.bits}-bit" if "scales" in module else None
        for key, value in module.items():
            if isinstance(value, mx.array) and not key.startswith("_"):
                share[packed or str(value.dtype).removeprefix("mlx.core.")] += value.nbytes
    return share.most_common(1)[0][0]


# Facts about the model


def _context_length(config: dict[str, Any]) -> int | None:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def device_name() -> str:
    """MLX's version and device, for people."""
    from importlib import metadata

    import mlx.core as mx

    version = f"MLX {metadata.version('mlx')}"
    if not half_precision_is_emulated():
        return f"{version}, {'Metal' if mx.metal.is_available() else 'CUDA'}"
    return f"{version}, CPU + OpenBLAS" if cpu_blas.prepare().status == "loaded" else f"{version}, CPU"


def _fingerprint(path: Path, adapter_path: str | Path | None, precision: str) -> str:
    names = {
        "config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        *_TOKENIZER_FILES,
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
    files = [path / name for name in sorted(names) if (path / name).exists()]
    files += sorted(path.glob("model*.safetensors"))
    if adapter_path is not None:
        folder = Path(adapter_path).expanduser()
        files += [folder / "adapter_config.json", folder / "adapters.safetensors"]
    return hashlib.sha256(f"{content_key(*files)} {precision}".encode()).hexdigest()[:32]
