"""What this installation has, what it lacks, and the command that mends it. It looks and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from ..backends import cpu_blas, fit, sources

__all__ = ["Finding", "examine", "report"]

_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
_MARKS = {"ok": "✓", "note": "·", "problem": "✗"}
_LOW_DISK = 2e9


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    topic : str
    status : {"ok", "note", "problem"}
        A "note" costs speed or comfort; a "problem" keeps something from working.
    text : str
    fix : str
        The command, or what else to do; empty if there is nothing to mend.
    """

    topic: str
    status: Literal["ok", "note", "problem"]
    text: str
    fix: str = ""


def examine() -> list[Finding]:
    """Look at versions, back end, BLAS, memory, disk and the Hub. Touches no network; loads MLX."""
    looks: list[Callable[[], Iterator[Finding]]] = [_versions, _backend, _blas, _memory, _disk, _hub]
    return [finding for look in looks for finding in look()]


def report(findings: list[Finding]) -> str:
    """The findings as text, a line each, and under it what to do."""
    width = max((len(finding.topic) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]} {finding.topic:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"  {'':<{width}}  → {finding.fix}")
    return "\n".join(lines)


def _versions() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()}, {platform.platform(terse=True)}")
    try:
        own = importlib.metadata.distribution("mlx-nb")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("mlx-nb", "problem", "isn't installed, only imported", "pip install -e . in its folder")
        return
    yield Finding("mlx-nb", "ok", own.version)
    for text in own.requires or ():
        requirement = Requirement(text)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if not optional:
            yield _version(requirement, needed=True)
    for name in ("ipykernel", "jupyterlab"):
        yield _version(Requirement(name), needed=False)


def _version(requirement: Requirement, *, needed: bool) -> Finding:
    name, wanted = requirement.name, str(requirement.specifier)
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if needed:
            return Finding(name, "problem", "is missing", f"pip install '{name}{wanted}'")
        return Finding(
            name, "note", "isn't installed here, which notebooks need", "pip install 'mlx-nb[lab]'"
        )
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(name, "ok", found)
    return Finding(name, "problem", f"{found}, but {wanted} is needed", f"pip install '{name}{wanted}'")


def _backend() -> Iterator[Finding]:
    installed = [name for name in _BACKENDS if cpu_blas.installed(name)]
    if sys.platform == "linux" and len(installed) > 1:
        yield Finding(
            "back end",
            "problem",
            f"{' and '.join(installed)} unpack into the same folder: one has overwritten the other",
            f"pip uninstall -y {' '.join(installed)} mlx && pip install 'mlx-nb[cpu]' (or cuda12, cuda13)",
        )
        return
    try:
        cpu_blas.require_backend()
        cpu_blas.prepare()  # before MLX is imported, or it is too late
        from ..backends.loader import device_name

        yield Finding("back end", "ok", device_name())
    except Exception as error:  # whatever keeps MLX from being imported
        yield Finding("back end", "problem", *_split(str(error)))


def _blas() -> Iterator[Finding]:
    found = cpu_blas.prepare()
    match found.status:
        case "loaded":
            count = cpu_blas.threads()
            threads = f" {count} threads of {os.cpu_count()} cores." if count else ""
            yield Finding("BLAS", "ok", found.message + threads)
        case "not needed":
            yield Finding("BLAS", "ok", found.message)
        case _:
            yield Finding("BLAS", "note", *_split(found.message))


def _memory() -> Iterator[Finding]:
    host = fit.host_memory()
    try:
        device = fit.device_memory()
    except Exception:  # no back end, which was found already
        yield Finding("memory", "ok", fit.size(host))
        return
    of = "" if device == host else f", {fit.size(device)} for the GPU"
    yield Finding("memory", "ok", f"{fit.size(host)}{of}; an engine may use 90 % (--gpu-memory-utilization)")


def _disk() -> Iterator[Finding]:
    from huggingface_hub import constants

    places = {"HF_HUB_CACHE": Path(constants.HF_HUB_CACHE), "MLX_NB_CACHE": sources.cache_folder()}
    for setting, folder in places.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        text = f"{fit.size(free)} free for {folder} ({setting})"
        if not (there.is_dir() and os.access(there, os.W_OK)):
            yield Finding(
                "disk", "problem", f"{folder} can't be written", f"let {setting} name another folder"
            )
        elif free < _LOW_DISK:
            yield Finding("disk", "note", text, f"free some, or let {setting} name a folder on another disk")
        else:
            yield Finding("disk", "ok", text)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        yield Finding("Hub", "note", "HF_HUB_OFFLINE is set: nothing is downloaded", "unset HF_HUB_OFFLINE")
    if get_token() is None:
        yield Finding("Hub", "note", "no token, which gated and private models need", "hf auth login")
    else:
        yield Finding("Hub", "ok", "there is a token")


def _split(message: str) -> tuple[str, str]:
    """A message of the form "What: what to do", in two."""
    text, _, fix = message.partition(": ")
    return text, fix
