"""Folders of models that see: which they are, and reading them with mlx-vlm."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError

__all__ = ["read_revealing_model", "read_vision_model", "require_trust", "sees"]

_SEEING = ("vision", "visual", "image", "patch")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def sees(path: Path, config: dict[str, Any]) -> bool:
    """Whether a folder has all that pictures take: weights, a processor, and a model of mlx-vlm's.

    Conversions to text alone keep the configuration of what they left out, so the names of the weights decide.
    """
    if not config.get("vision_config") or not any((path / name).exists() for name in _PROCESSORS):
        return False
    if not any(part in name for name in _tensors(path) for part in _SEEING):
        return False
    from mlx_vlm.utils import get_model_and_args

    try:
        model, _ = get_model_and_args(config)
    except (ImportError, ValueError, KeyError):
        return False
    return hasattr(model, "VisionModel")


def read_vision_model(path: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model, its weights not read yet, and its processor.

    Raises
    ------
    ModelLoadError
        What can't be read.
    """
    from mlx_vlm.utils import load

    require_trust(path, trust_remote_code)
    model, processor = _read(path, lambda: load(str(path), lazy=True, trust_remote_code=trust_remote_code))
    return model, processor


def read_revealing_model(path: Path, trust_remote_code: bool) -> Any:
    """mlx-vlm's model of a folder, its weights not read yet, whether it sees or not.

    Raises
    ------
    ModelLoadError
        What can't be read, or is of a type that mlx-vlm doesn't know.
    """
    from mlx_vlm.utils import load_model

    require_trust(path, trust_remote_code)
    return _read(path, lambda: load_model(path, lazy=True, trust_remote_code=trust_remote_code))


def require_trust(path: Path, trust_remote_code: bool) -> None:
    """Refuse a folder whose own Python file mlx-vlm would run without being asked to."""
    if not trust_remote_code and "model_file" in json.loads((path / "config.json").read_text("utf-8")):
        raise ModelLoadError(
            f"{path} runs Python code of its own: load it with trust_remote_code=True if you trust it."
        )


def _read(path: Path, read: Callable[[], Any]) -> Any:
    model_type = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of parts that are left out here, sound for one
            return read()
    except Exception as error:
        line = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelLoadError(
            f"{path} is of type {model_type!r}, and mlx-vlm can't load it ({line}): fetch it again, or choose "
            "another model."
        ) from error


def _tensors(path: Path) -> set[str]:
    """Names of the tensors in a folder, from its files' headers."""
    names: set[str] = set()
    for file in path.glob("model*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            names.update(json.loads(stream.read(size)))
    return names
