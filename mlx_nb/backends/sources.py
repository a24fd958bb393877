"""Which model is meant, and where it lies on disk.

A MODEL is a Hub id, a local folder, a ``.gguf`` file, an alias or ``demo``. `resolve` decides which, without
network; `fetch` makes it a local folder in mlx-lm's format, downloading and converting into the user's cache
as needed. Loading the folder is `loader`'s work.
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import fnmatch
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs

from ..errors import MlxNbError, ModelLoadError, UnknownModelError
from ..outputs import LoadProgress
from . import fit

__all__ = [
    "BUILT_IN",
    "DEMO",
    "ModelSource",
    "aliases",
    "cache_folder",
    "fetch",
    "is_complete",
    "resolve",
    "set_alias",
]

DEMO = "demo"
OnProgress = Callable[[LoadProgress], None]

_DEMO_REPOS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "mlx-community/SmolLM2-135M-Instruct")
BUILT_IN = {
    "gemma3-1b": "mlx-community/gemma-3-1b-it-4bit",
    "llama3.2-1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2-3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "mistral-7b": "mlx-community/Mistral-7B-Instruct-v0.3-4bit",
    "qwen3-0.6b": "mlx-community/Qwen3-0.6B-4bit",
    "qwen3-1.7b": "mlx-community/Qwen3-1.7B-4bit",
    "qwen3-4b": "mlx-community/Qwen3-4B-4bit",
    "qwen3-8b": "mlx-community/Qwen3-8B-4bit",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What mlx-lm needs of a repository; leaves out PyTorch and other duplicates of the weights.
_HUB_FILES = [
    "*.json",
    "*.jinja",
    "*.jsonl",
    "*.py",
    "*.tiktoken",
    "*.txt",
    "model*.safetensors",
    "tokenizer.model",
]
_FORMS = "a Hub id (org/name), a folder, a .gguf file, an alias or 'demo'"
_CONVERSION = 1  # raise it when the converter changes what it writes


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from; `value` is a Hub id, or a path; `name` is for people."""

    kind: Literal["hub", "folder", "gguf", "demo"]
    value: str
    name: str


def resolve(model: str | os.PathLike[str]) -> ModelSource:
    """Say what a MODEL means, without touching the network.

    Raises
    ------
    UnknownModelError
        It is none of the possible things; the line says what it could be.
    """
    text = os.fspath(model).strip()
    if isinstance(model, str):
        text = aliases().get(text, text)
        if text == DEMO:
            return ModelSource("demo", DEMO, "SmolLM2-135M-Instruct")
        if not text:
            raise UnknownModelError(f"No model given: name {_FORMS}.")
    path = Path(text).expanduser()
    is_gguf = text.lower().endswith(".gguf")
    if path.is_dir():
        return ModelSource("folder", str(path.resolve()), path.resolve().name)
    if path.is_file():
        if is_gguf:
            return ModelSource("gguf", str(path.resolve()), path.stem)
        raise UnknownModelError(f"{path} is a file but no .gguf: give the folder that holds the model.")
    if is_gguf or isinstance(model, os.PathLike) or text.startswith(("/", ".", "~")):
        raise UnknownModelError(f"There is no {'file' if is_gguf else 'folder'} {path}.")
    if _HUB_ID.fullmatch(text):
        return ModelSource("hub", text, text)
    close = difflib.get_close_matches(text.lower(), [DEMO, *aliases()], n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}? A Hub id has the form org/name." if close else f"name {_FORMS}."
    )
    raise UnknownModelError(f"Unknown model {text!r}: {hint}")


def fetch(source: ModelSource, on_progress: OnProgress | None = None, *, memory_share: float = 0.9) -> Path:
    """Return the local folder of a model, in mlx-lm's format; fetches and converts what isn't cached.

    Parameters
    ----------
    on_progress
        Called from this thread and, while the Hub downloads, from its threads. What it raises ends the fetch.
    memory_share : float
        Share of the device's memory that the model may take: a larger one isn't fetched.

    Raises
    ------
    ModelLoadError
        One line that says what failed and what to do.
    """
    report = on_progress or (lambda _: None)
    try:
        if source.kind == "hub":
            return _cached_snapshot(source.value) or _download_snapshot(source.value, report, memory_share)
        if source.kind == "gguf":
            return _converted(Path(source.value), report, memory_share)
        if source.kind == "demo":
            return _demo(report, memory_share)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        raise ModelLoadError(
            f"{source.name} can't be stored: {reason}. MLX_NB_CACHE and HF_HUB_CACHE name other places."
        ) from error
    return Path(source.value)


def aliases() -> dict[str, str]:
    """Short names and what they stand for: the built-in ones, and over them the user's."""
    return dict(sorted((BUILT_IN | _user_aliases()).items()))


def set_alias(name: str, model: str | os.PathLike[str] | None) -> None:
    """Give a model a short name of the user's own, kept across sessions; None takes the name away again."""
    if name == DEMO or not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise UnknownModelError(
            f"{name!r} can't be an alias: use letters, digits, '.', '-', '_'; not 'demo'."
        )
    mine = _user_aliases()
    if model is not None:
        mine[name] = resolve(model).value
    elif name in mine:
        del mine[name]
    else:
        raise UnknownModelError(f"There is no alias {name!r} of yours.")
    file = _aliases_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as stream:
        json.dump(mine, stream, indent=1)
    Path(stream.name).replace(file)


def cache_folder() -> Path:
    """Where fetched and converted models go: MLX_NB_CACHE, or the user's cache folder."""
    return Path(os.environ.get("MLX_NB_CACHE") or platformdirs.user_cache_dir("mlx_nb")).expanduser()


def _aliases_file() -> Path:
    return Path(platformdirs.user_config_dir("mlx_nb")) / "aliases.json"


def _user_aliases() -> dict[str, str]:
    file = _aliases_file()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} can't be read ({error}): mend it or delete it.") from error
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ModelLoadError(f"{file} must map names to models: mend it or delete it.")
    return found


# The Hub


def _cached_snapshot(repo: str) -> Path | None:
    """A complete copy in the Hub's own cache, so that what was fetched once works offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if is_complete(folder) else None


def is_complete(folder: Path) -> bool:
    """Whether a folder has config.json and all of its weights."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        weights = all((folder / shard).exists() for shard in shards)
    else:
        weights = any(folder.glob("model*.safetensors"))
    return weights and (folder / "config.json").exists()


def _download_snapshot(repo: str, report: OnProgress, memory_share: float) -> Path:
    from huggingface_hub import errors, snapshot_download

    report(LoadProgress("download", f"Asking the Hub for {repo}"))
    try:
        _check_room(repo, memory_share)
        bar = _bar_class(repo, report)
        folder = Path(snapshot_download(repo, allow_patterns=_HUB_FILES, tqdm_class=bar))
    except errors.GatedRepoError as error:
        page = f"https://huggingface.co/{repo}"
        problem = f"{repo} is gated: accept its terms at {page}, then run `hf auth login` with that account."
        raise ModelLoadError(problem) from error
    except errors.RepositoryNotFoundError as error:
        problem = f"The Hub has no model {repo}: check the spelling (or `hf auth login`, if it is private)."
        raise ModelLoadError(problem) from error
    except errors.LocalEntryNotFoundError as error:
        offline = isinstance(error.__cause__, errors.OfflineModeIsEnabled)
        why = (
            "HF_HUB_OFFLINE is set: unset it to download"
            if offline
            else "the Hub can't be reached, check the network"
        )
        raise ModelLoadError(f"{repo} isn't in the local cache, and {why}.") from error
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == 401:
            problem = "The Hub doesn't take your token: run `hf auth login` again, or unset HF_TOKEN."
            raise ModelLoadError(problem) from error
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise ModelLoadError(f"The Hub refused {repo}: {first}. Try again later.") from error
    except (OSError, MlxNbError):  # the disk, which concerns the caller; no room, or told to stop
        raise
    except Exception as error:  # the Hub library has had two HTTP libraries, each with its own errors
        problem = (
            f"Downloading {repo} stopped ({error}): check the network and start again, it goes on from there."
        )
        raise ModelLoadError(problem) from error
    if not is_complete(folder):
        raise ModelLoadError(
            f"{repo} has no config.json with safetensors weights: choose another, or give a .gguf file."
        )
    return folder


def _check_room(repo: str, memory_share: float) -> None:
    """Refuse what neither the disk nor memory has room for, before it is downloaded."""
    from huggingface_hub import HfApi, constants, snapshot_download

    from .loader import half_precision_is_emulated

    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=10)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        silent = _bar_class(repo, lambda _: None)
        folder = Path(snapshot_download(repo, allow_patterns=["config.json"], tqdm_class=silent))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except Exception:  # the download that follows meets it as well, and says what to do
        return
    wanted = {
        name: size
        for name, size in sizes.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in _HUB_FILES)
    }
    weights = sum(size for name, size in wanted.items() if name.endswith(".safetensors"))
    float32 = half_precision_is_emulated()
    fit.require_memory(repo, fit.needs(config, weights, float32=float32), memory_share)
    cache = Path(constants.HF_HUB_CACHE)
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    present = sum(file.stat().st_size for file in blobs.glob("*"))
    fit.require_disk(repo, sum(wanted.values()) - present, cache, "HF_HUB_CACHE", float32=float32)


def _bar_class(repo: str, report: OnProgress) -> type[Any]:
    """A progress bar that draws nothing and reports instead."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Only the bar that counts bytes on disk speaks, ten times a second at most."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.speaks = kwargs.get("unit") == "B" and not str(kwargs.get("name")).endswith(".transfer")
            self.spoke = 0.0
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self.speaks and self.total and time.monotonic() - self.spoke > 0.1:
                self.spoke = time.monotonic()
                size = f"{self.n / 1e6:.0f} of {self.total / 1e6:.0f} MB"
                report(LoadProgress("download", f"Downloading {repo}: {size}", min(self.n / self.total, 1.0)))
            return drawn

        def display(self, *args: Any, **kwargs: Any) -> None:
            """Draw nothing."""

    return Bar


# GGUF files and the demo


def _converted(file: Path, report: OnProgress, memory_share: float) -> Path:
    """The conversion of a GGUF file that suits this machine, made once."""
    from .gguf import convert, converted_size
    from .loader import content_key, half_precision_is_emulated

    emulated = half_precision_is_emulated()
    policy = "float32" if emulated else "kept"
    folder = cache_folder() / "gguf" / f"{file.stem}-{content_key(file)[:16]}-{policy}-{_CONVERSION}"
    with _locked(folder, report):
        if not (folder / "config.json").exists():
            report(LoadProgress("convert", f"Converting {file.name}", 0.0))
            dtype = "float32" if emulated else None
            takes = converted_size(file, keep_quantized=not emulated, dtype=dtype)
            fit.require_memory(file.stem, fit.Needs(takes, 0, 0, policy if emulated else ""), memory_share)
            fit.require_disk(file.stem, takes, folder, "MLX_NB_CACHE", float32=emulated)
            convert(file, folder, keep_quantized=not emulated, dtype=dtype, progress=report)
    return folder


def _demo(report: OnProgress, memory_share: float) -> Path:
    for repo in _DEMO_REPOS:
        if folder := _cached_snapshot(repo):
            return folder
    from . import demo

    file = cache_folder() / "demo" / demo.FILE
    with _locked(file, report):
        if not file.exists() or file.stat().st_size != demo.FILE_BYTES:
            demo.fetch(file, report)
    return _converted(file, report, memory_share)


@contextmanager
def _locked(target: Path, report: OnProgress) -> Iterator[None]:
    """Keep other processes from making the same thing at once; renaming keeps it whole either way."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(LoadProgress("download", "Waiting for another process that is fetching the same model"))
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
