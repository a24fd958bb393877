"""The package from outside: what importing it costs, what it names and requires, what gets built from it."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlx_nb

PACKAGE = Path(mlx_nb.__file__).parent
ROOT = PACKAGE.parent
HEAVY = {"mlx.core", "mlx_lm", "mlx_vlm", "transformers", "pandas"}
LOAD_EXT = "shell.run_line_magic('load_ext', 'mlx_nb')"


def run_python(code: str, **environment: str) -> str:
    """Return what a fresh interpreter prints, with warnings as errors."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def in_fresh_shell(statement: str, report: str, tmp_path: Path) -> str:
    """Run a statement in a new process that has an IPython shell; return what `report` prints after it."""
    code = (
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "import sys, time\n"
        "shell = InteractiveShell.instance()\n"
        "started = time.perf_counter()\n"
        f"{statement}\n"
        "seconds = time.perf_counter() - started\n"
        f"print({report})\n"
    )
    return run_python(code, IPYTHONDIR=str(tmp_path))


@pytest.mark.parametrize("statement", ["import mlx_nb", LOAD_EXT], ids=["import", "load_ext"])
def test_importing_and_loading_pull_in_no_model_library(statement: str, tmp_path: Path) -> None:
    loaded = in_fresh_shell(statement, "*sys.modules", tmp_path).split()

    assert "mlx_nb" in loaded
    assert HEAVY.isdisjoint(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("statement", ["import mlx_nb", LOAD_EXT], ids=["import", "load_ext"])
def test_importing_and_loading_take_under_0_3_s(statement: str, tmp_path: Path) -> None:
    # The best of five: a busy computer can only make a run slower, never faster.
    seconds = min(float(in_fresh_shell(statement, "seconds", tmp_path)) for _ in range(5))

    assert seconds < 0.3


@pytest.mark.parametrize("name", mlx_nb.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(mlx_nb, name) is not None


def test_all_and_dir_name_the_same_objects() -> None:
    assert sorted(mlx_nb.__all__) == sorted(set(dir(mlx_nb)))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EngineCoer'"):
        _ = mlx_nb.EngineCoer


def test_the_version_is_the_one_installed() -> None:
    assert mlx_nb.__version__ == importlib.metadata.version("mlx-nb")


# Required without an import of ours, each for a reason.
NOT_IMPORTED = {
    "ipywidgets",  # the browser half of tqdm.auto's bars and of every widget
}


def normal(requirement: str) -> str:
    """Return the comparable name in a requirement: `mlx-lm>=0.32,<0.33` is `mlx_lm`."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("-", "_")


def foreign_imports() -> set[str]:
    """Return the top-level name of every module outside the standard library that the package imports."""
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    from_ = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.partition(".")[0] for name in plain | from_} - sys.stdlib_module_names - {"mlx_nb"}


DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python"}
"""Of modules that go by another name."""


def test_what_is_imported_is_required_and_what_is_required_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {normal(requirement) for requirement in project["dependencies"]}
    extras = project["optional-dependencies"]
    optional = {
        normal(requirement)
        for name in ("lab", "polars", "video", "remote", "dask")
        for requirement in extras[name]
    }
    imported = {normal(DISTRIBUTIONS.get(name, name)) for name in foreign_imports()}

    assert imported - required - optional == set()
    assert required - imported == NOT_IMPORTED


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist, and the wheel made from it, built where no node or git can be found."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        env=os.environ | {"PATH": str(out)},
        check=True,
    )
    return out


def source_files(folder: Path) -> set[str]:
    """Return the files below a folder, relative to the source tree, less what tools leave behind."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "node_modules", ".ipynb_checkpoints"} & set(path.parts)
    }


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_wheel_holds_the_package_with_its_bundle_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert names == source_files(PACKAGE) | {"mlx_nb/notebooks/01_first_steps.ipynb"}
    assert "mlx_nb/py.typed" in names
    assert any(name.startswith("mlx_nb/static/") and name.endswith(".js") for name in names)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_sdist_holds_the_sources_of_everything_in_the_wheel(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    folders = [PACKAGE, ROOT / "js", ROOT / "notebooks", ROOT / "tests"]
    assert names - {"PKG-INFO", ".gitignore"} == {"LICENSE", "README.md", "pyproject.toml"}.union(
        *map(source_files, folders)
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_wheel_installs_and_imports_without_node(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="this environment was made by a tool that leaves pip out")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(tmp_path), str(wheel)], env=os.environ | {"PATH": ""}, check=True)

    found = subprocess.run(
        [sys.executable, "-c", "import mlx_nb; print(mlx_nb.__version__, mlx_nb.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found == [mlx_nb.__version__, str(tmp_path / "mlx_nb" / "__init__.py")]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings its back end")
def test_the_import_says_which_extra_brings_a_missing_back_end(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    python_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import mlx_nb; print(mlx_nb.__version__)"],
        env=os.environ | {"PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == mlx_nb.__version__
    assert "pip install 'mlx-nb[cpu]'" in done.stderr
