"""What is on disk: models in the Hub's cache and those that mlx_nb fetched or converted itself.

It looks and never fetches. What a model takes in memory is estimated from its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..backends import fit, sources

__all__ = ["DiskModel", "model_names", "on_disk"]


@dataclass(frozen=True, slots=True)
class DiskModel:
    """A model on this machine.

    Attributes
    ----------
    name : str
        The MODEL to start it by.
    path : Path
        Its folder.
    size : int
        Bytes on disk.
    precision : str
        What the weights are stored as; empty if that isn't known.
    memory : int or None
        About how many bytes it takes once loaded, KV cache of one request included.
    complete : bool
        False for a download that was interrupted; starting the model goes on with it.
    aliases : tuple of str
    """

    name: str
    path: Path
    size: int
    precision: str = ""
    memory: int | None = None
    complete: bool = True
    aliases: tuple[str, ...] = ()


def on_disk() -> list[DiskModel]:
    """All models here, by name; what the demo is made of counts as "demo"."""
    return sorted([*_in_hub_cache(), *_converted()], key=lambda model: model.name.lower())


def model_names() -> list[str]:
    """What MODEL may be without a path: "demo", aliases, and Hub ids in the Hub's cache. Opens no file."""
    names = {sources.DEMO, *sources.aliases()}
    names |= {_repo(folder) for folder in _hub_folders()}
    return sorted(names)


def _hub_folders() -> list[Path]:
    from huggingface_hub import constants

    return sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))


def _repo(folder: Path) -> str:
    return "/".join(folder.name.split("--")[1:3])


def _in_hub_cache() -> Iterator[DiskModel]:
    of_repo: dict[str, list[str]] = {}
    for alias, repo in sources.aliases().items():
        of_repo.setdefault(repo, []).append(alias)
    for folder in _hub_folders():
        # A snapshot links to the files that hold its content.
        files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
        snapshot = _snapshot(folder)
        complete = snapshot is not None and sources.is_complete(snapshot)
        # Other kinds of repositories have neither weights that we read nor a download under way.
        if complete or any(file.suffix == ".incomplete" for file in files):
            name = _repo(folder)
            aliases = tuple(of_repo.get(name, ()))
            yield _described(snapshot or folder, name, _bytes(files), complete=complete, aliases=aliases)


def _snapshot(folder: Path) -> Path | None:
    """The snapshot that "main" means."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _converted() -> Iterator[DiskModel]:
    cache = sources.cache_folder()
    downloads = list((cache / "demo").glob("*.gguf"))
    demo = {file.stem for file in downloads}
    for folder in sorted((cache / "gguf").glob("[!.]*")):
        if not sources.is_complete(folder):
            continue
        is_demo = any(folder.name.startswith(f"{stem}-") for stem in demo)
        files = [*folder.glob("*"), *(downloads if is_demo else ())]
        yield _described(folder, sources.DEMO if is_demo else str(folder), _bytes(files))


def _described(
    folder: Path, name: str, size: int, *, complete: bool = True, aliases: tuple[str, ...] = ()
) -> DiskModel:
    from ..backends.loader import half_precision_is_emulated

    needed = fit.needs_of(folder, float32=half_precision_is_emulated()) if complete else None
    return DiskModel(
        name=name,
        path=folder,
        size=size,
        precision=fit.precision_of(folder),
        memory=None if needed is None else needed.total,
        complete=complete,
        aliases=aliases,
    )


def _bytes(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())
