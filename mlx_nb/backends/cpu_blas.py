"""A fast BLAS for MLX on a Linux CPU, and whether MLX has a back end at all.

MLX's CPU wheel brings the reference BLAS, about 4 GFLOP/s. It calls matrix products by their plain names
(``cblas_sgemm``), so a system OpenBLAS that is loaded for the whole process *before* MLX takes their place:
10, 45 and 59 GFLOP/s at 1, 16 and 64 rows on two cores, against 3.6. `prepare` does that once a process and says
in one log line what came of it. What is installed decides, not the platform's name alone: Metal and CUDA builds
need none of this.

This module never imports MLX.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["BlasReport", "installed", "prepare", "require_backend", "set_threads", "threads"]

logger = logging.getLogger("mlx_nb")

_GPU_BACKENDS = ("mlx-metal", "mlx-cuda-12", "mlx-cuda-13", "mlx-cuda")
# Fedora's plain name is the serial build, so its threaded one goes first. Debian's plain name is whichever
# build its alternatives point at.
_LIBRARIES = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")
_HOW_TO = (
    "install it to multiply matrices 3 to 16 times as fast (Debian, Ubuntu: apt install libopenblas0-pthread; "
    "Fedora: dnf install openblas-threads), then restart Python"
)


@dataclass(frozen=True, slots=True)
class BlasReport:
    """What `prepare` found.

    Attributes
    ----------
    status : {"loaded", "late", "missing", "not needed"}
        "late": MLX was imported before, and keeps its own slow BLAS.
    message : str
        One line for people.
    library : str or None
        The file name that was loaded.
    """

    status: Literal["loaded", "late", "missing", "not needed"]
    message: str
    library: str | None = None


@functools.cache
def prepare() -> BlasReport:
    """Load OpenBLAS if this process will run MLX on a Linux CPU; later calls return the first report."""
    report = _prepare()
    level = logging.WARNING if report.status in {"late", "missing"} else logging.INFO
    logger.log(level, "%s", report.message)
    return report


def threads() -> int | None:
    """Threads that OpenBLAS uses; None where MLX doesn't use OpenBLAS."""
    library = _openblas()
    return None if library is None else int(library.openblas_get_num_threads())


def set_threads(count: int) -> None:
    """Have OpenBLAS use so many threads, in this whole process and at once.

    Raises
    ------
    ValueError
        For no positive number, or where MLX doesn't use OpenBLAS.
    """
    if count < 1:
        raise ValueError(f"blas_threads must be at least 1, got {count}")
    library = _openblas()
    if library is None:
        raise ValueError(f"blas_threads is for OpenBLAS, which isn't in use here. {prepare().message}")
    library.openblas_set_num_threads(count)


def _openblas() -> ctypes.CDLL | None:
    if prepare().status != "loaded":
        return None
    library = ctypes.CDLL(None)  # it was loaded for the whole process
    return library if hasattr(library, "openblas_set_num_threads") else None


def require_backend() -> None:
    """Raise ImportError, saying which extra to install, when MLX on Linux has no back end."""
    if sys.platform != "linux" or _backend_library() is not None:
        return
    raise ImportError(
        "MLX has no back end on this machine: pip install 'mlx-nb[cpu]' "
        "(or 'mlx-nb[cuda12]', 'mlx-nb[cuda13]' with an NVIDIA GPU)."
    )


def _prepare() -> BlasReport:
    if sys.platform != "linux":
        return BlasReport("not needed", "OpenBLAS isn't needed: this is not a Linux build of MLX.")
    gpu = next((name for name in _GPU_BACKENDS if installed(name)), None)
    if gpu is not None:
        return BlasReport("not needed", f"OpenBLAS isn't needed: {gpu} is installed.")
    if _preloaded():
        return BlasReport("loaded", "MLX uses the OpenBLAS that this process had already loaded.")
    if "mlx.core" in sys.modules:
        return BlasReport(
            "late",
            "MLX was imported before mlx_nb and stays on its slow BLAS: "
            "restart Python and start the engine before anything imports mlx.",
        )
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return BlasReport("loaded", f"MLX uses the system's OpenBLAS ({name}).", library=name)
    return BlasReport("missing", f"No OpenBLAS found, so MLX is slow on this CPU: {_HOW_TO}.")


def installed(distribution: str) -> bool:
    """Whether a distribution is installed, by the name it goes by on the index."""
    import importlib.metadata  # a third of this package's import time otherwise

    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _preloaded() -> bool:
    """Whether OpenBLAS is already among the process's global symbols (LD_PRELOAD, or another loader)."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


def _backend_library() -> Path | None:
    """MLX's shared library, which comes with a back end and not with the ``mlx`` package itself."""
    spec = importlib.util.find_spec("mlx")
    for folder in spec.submodule_search_locations or () if spec else ():
        library = Path(folder) / "lib" / "libmlx.so"
        if library.exists():
            return library
    return None
