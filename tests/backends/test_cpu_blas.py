"""OpenBLAS is loaded once, before MLX, and only where MLX runs on a Linux CPU."""

import ctypes
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_nb.backends import cpu_blas


class System:
    """A machine to choose: its platform, packages, libraries, and whether MLX is imported already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packages = {"mlx": "1.0", "mlx-cpu": "1.0"}
        self.libraries: set[str] = set()
        self.opened: list[tuple[str, int]] = []
        self.global_symbols = SimpleNamespace()
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(importlib.metadata, "version", self.version)
        monkeypatch.setattr(ctypes, "CDLL", self.open)
        self.import_mlx = lambda: monkeypatch.setitem(sys.modules, "mlx.core", SimpleNamespace())
        monkeypatch.delitem(sys.modules, "mlx.core", raising=False)

    def version(self, name: str) -> str:
        if name not in self.packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.packages[name]

    def open(self, name: str | None, mode: int = ctypes.DEFAULT_MODE) -> SimpleNamespace:
        if name is None:
            return self.global_symbols
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")
        self.opened.append((name, mode))
        return SimpleNamespace()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[System]:
    cpu_blas.prepare.cache_clear()
    yield System(monkeypatch)
    cpu_blas.prepare.cache_clear()


def test_openblas_is_loaded_for_the_whole_process(system: System) -> None:
    system.libraries = {"libopenblas.so.0"}
    report = cpu_blas.prepare()
    assert (report.status, report.library) == ("loaded", "libopenblas.so.0")
    assert system.opened == [("libopenblas.so.0", ctypes.RTLD_GLOBAL)]


def test_a_threaded_build_goes_before_a_plain_one(system: System) -> None:
    system.libraries = {"libopenblas.so.0", "libopenblasp.so.0"}
    assert cpu_blas.prepare().library == "libopenblasp.so.0"


def test_one_log_line_a_process(system: System, caplog: pytest.LogCaptureFixture) -> None:
    system.libraries = {"libopenblas.so.0"}
    with caplog.at_level(logging.INFO, "mlx_nb"):
        first, second = cpu_blas.prepare(), cpu_blas.prepare()
    assert first is second
    assert [record.getMessage() for record in caplog.records] == [first.message]


def test_without_openblas_the_line_says_how_to_get_it(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    assert cpu_blas.prepare().status == "missing"
    assert "apt install libopenblas0-pthread" in caplog.text


def test_mlx_imported_first_is_reported_and_nothing_loaded(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    system.libraries = {"libopenblas.so.0"}
    system.import_mlx()
    assert cpu_blas.prepare().status == "late"
    assert "restart Python" in caplog.text
    assert not system.opened


def test_a_preloaded_openblas_counts_even_after_mlx(system: System) -> None:
    system.import_mlx()
    system.global_symbols.openblas_get_config = object()
    assert cpu_blas.prepare().status == "loaded"


@pytest.mark.parametrize("package", ["mlx-cuda-12", "mlx-cuda-13"])
def test_a_gpu_back_end_needs_none(package: str, system: System) -> None:
    system.libraries = {"libopenblas.so.0"}
    system.packages[package] = "1.0"
    assert cpu_blas.prepare().status == "not needed"
    assert not system.opened


def test_another_platform_needs_none(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu_blas.prepare().status == "not needed"


@pytest.fixture
def mlx_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where MLX seems to be installed; without a back end."""
    spec = ModuleSpec("mlx", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    find: Callable[..., ModuleSpec | None] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: spec if name == "mlx" else find(name, *a)
    )
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_mlx_without_a_back_end_names_the_extras(mlx_folder: Path) -> None:
    with pytest.raises(ImportError, match=r"mlx-nb\[cpu\].*cuda12.*cuda13"):
        cpu_blas.require_backend()


def test_mlx_with_a_back_end_is_fine(mlx_folder: Path) -> None:
    (mlx_folder / "lib").mkdir()
    (mlx_folder / "lib" / "libmlx.so").touch()
    cpu_blas.require_backend()


def test_a_mac_has_its_back_end_by_itself(mlx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    cpu_blas.require_backend()


def test_this_machine_has_a_back_end_and_is_prepared_without_importing_mlx() -> None:
    code = (
        "import sys; from mlx_nb.backends import cpu_blas; cpu_blas.require_backend();"
        "print(cpu_blas.prepare().status); assert 'mlx.core' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() in {"loaded", "missing", "not needed"}
