"""Imports go strictly downward, and each foreign library has one home. Checked from the source alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_nb

LEVELS = {
    name: level
    for level, names in enumerate(
        [
            (
                "errors",
                "validation",
                "codec",
                "footprint",
                "config",
                "sampling",
                "request",
                "outputs",
                "remote",
            ),
            ("scheduler", "backends", "prompts"),
            ("engine",),
            ("session",),
            ("widgets",),
            ("frames",),
            ("notebook",),
        ]
    )
    for name in names
}

# The bottom level is one vocabulary (a request holds sampling parameters); other level-mates are strangers.
VOCABULARY = 0

# Foreign library -> the packages that may import it.
HOMES = {
    "mlx": {"backends"},
    "mlx_lm": {"backends"},
    "mlx_vlm": {"backends"},
    "IPython": {"notebook"},
    "ipykernel": {"notebook"},
    "pandas": {"frames"},
    "openai": {"backends"},
    "anywidget": {"widgets"},
    "traitlets": {"widgets", "notebook"},
}

# `__init__` names the public objects of every level, and `__main__` is a program on top of them: neither is
# imported from below (a level may not import them either), so neither has a level.
ABOVE_ALL = {"__init__", "__main__"}


def violations(package: Path) -> list[str]:
    """Return one line for each import in `package` that breaks the rule."""
    return [
        f"{path.relative_to(package)}:{line}: {reason}"
        for path in sorted(package.rglob("*.py"))
        for line, target in imported_modules(path, package)
        if (reason := objection(part_of(path.relative_to(package)), target, package.name))
    ]


def part_of(relative: Path) -> str:
    """Return the name in the layer table that a file belongs to: its top folder, or its own name."""
    return relative.parts[0].removesuffix(".py")


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import in a file: nested and typing-only ones too."""
    parents = (package.name, *path.relative_to(package).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif name := name_given_to_import_function(node):
            yield node.lineno, name


def name_given_to_import_function(node: ast.AST) -> str | None:
    """Return "x.y" for `importlib.import_module("x.y")` and `__import__("x.y")`."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if function in {"import_module", "__import__"} and isinstance(name, str) else None


def objection(part: str, target: str, package: str) -> str | None:
    """Return why `part` may not import `target`, or None when it may."""
    top, *rest = target.split(".")
    if top == package:
        return inner_objection(part, rest[0] if rest else "__init__", package)
    homes = HOMES.get(top, {part})
    return None if part in homes else f"{top} belongs in {' or '.join(sorted(homes))}"


def inner_objection(part: str, other: str, package: str) -> str | None:
    """Return why `part` may not import `package.other`, or None when it may."""
    if part in ABOVE_ALL or part == other:
        return None
    if part not in LEVELS:
        return f"{part} has no level in the import rule"
    if other not in LEVELS:
        # A name of the package's root (say, `from mlx_nb import EngineCore`) may come from any level.
        return f"{part} may not import {package}.{other}"
    downward = LEVELS[other] < LEVELS[part]
    in_vocabulary = LEVELS[other] == LEVELS[part] == VOCABULARY
    return None if downward or in_vocabulary else f"{part} may not import {other}"


def test_every_import_of_the_package_goes_downward() -> None:
    assert violations(Path(mlx_nb.__file__).parent) == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return tmp_path / "pkg"


def write(package: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        pytest.param("engine/core.py", "from pkg.scheduler import scheduler", id="downward"),
        pytest.param("engine/core.py", "from ..errors import MlxNbError", id="downward-relative"),
        pytest.param("engine/core.py", "from . import output\nfrom .worker import run", id="own-package"),
        pytest.param("request.py", "from pkg.sampling import SamplingParams", id="vocabulary"),
        pytest.param("backends/batch.py", "import mlx.core as mx\nfrom mlx_lm.generate import x", id="home"),
        pytest.param("widgets/monitor.py", "import traitlets", id="first-of-two-homes"),
        pytest.param("notebook/magics.py", "import traitlets\nimport IPython", id="second-of-two-homes"),
        pytest.param("frames/generate.py", "import mlxtend, pandas", id="similar-name"),
        pytest.param("__init__.py", "from .notebook import extension\nfrom .engine import core", id="root"),
        pytest.param("__main__.py", "from pkg.notebook import extension", id="program"),
    ],
)
def test_allowed_imports_pass(package: Path, file: str, source: str) -> None:
    write(package, {file: source})

    assert violations(package) == []


@pytest.mark.parametrize(
    ("file", "source", "reason"),
    [
        ("engine/core.py", "import pkg.session", "engine may not import session"),
        ("engine/core.py", "from pkg import session", "engine may not import session"),
        ("engine/core.py", "from .. import session", "engine may not import session"),
        ("engine/core.py", "from ..session import models", "engine may not import session"),
        ("engine/a/b.py", "from ...session.models import x", "engine may not import session"),
        ("engine/__init__.py", "from ..session import models", "engine may not import session"),
        ("errors.py", "from . import engine", "errors may not import engine"),
        ("errors.py", "from .engine import core", "errors may not import engine"),
        ("scheduler/s.py", "from pkg.backends import base", "scheduler may not import backends"),
        ("backends/b.py", "from pkg.prompts import chat", "backends may not import prompts"),
        ("prompts/p.py", "from ..scheduler import s", "prompts may not import scheduler"),
        ("widgets/m.py", "from ..frames import results", "widgets may not import frames"),
        ("frames/f.py", "from ..notebook import stream", "frames may not import notebook"),
        ("engine/core.py", "from pkg import AsyncEngineCore", "engine may not import pkg.AsyncEngineCore"),
        ("engine/core.py", "import pkg", "engine may not import pkg.__init__"),
        ("engine/core.py", "from .. import __main__", "engine may not import pkg.__main__"),
        ("helpers.py", "from . import errors", "helpers has no level in the import rule"),
        ("engine/core.py", "import mlx.core as mx", "mlx belongs in backends"),
        ("engine/core.py", "from mlx import core", "mlx belongs in backends"),
        ("session/s.py", "from mlx_lm.utils import load", "mlx_lm belongs in backends"),
        ("__main__.py", "import mlx_vlm", "mlx_vlm belongs in backends"),
        ("__init__.py", "import pandas as pd", "pandas belongs in frames"),
        ("widgets/m.py", "from IPython.display import display", "IPython belongs in notebook"),
        ("frames/f.py", "import json, ipykernel.comm", "ipykernel belongs in notebook"),
        ("notebook/n.py", "import anywidget", "anywidget belongs in widgets"),
        ("frames/f.py", "import traitlets", "traitlets belongs in notebook or widgets"),
    ],
)
def test_a_forbidden_import_is_named(package: Path, file: str, source: str, reason: str) -> None:
    write(package, {file: source})

    assert violations(package) == [f"{file}:1: {reason}"]


@pytest.mark.parametrize(
    "source",
    [
        "def load():\n    from ..session import models\n",
        "class Engine:\n    async def start(self):\n        import pkg.session.models\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..session import models\n",
        "try:\n    from ..session import models\nexcept ImportError:\n    models = None\n",
        "import importlib\nimportlib.import_module('pkg.session')\n",
        "__import__('pkg.session')\n",
    ],
    ids=["function", "method", "typing-only", "try", "import_module", "__import__"],
)
def test_a_forbidden_import_is_found_wherever_it_hides(package: Path, source: str) -> None:
    write(package, {"engine/core.py": source})

    assert [line.partition(": ")[2] for line in violations(package)] == ["engine may not import session"]


def test_every_offending_line_is_reported_once(package: Path) -> None:
    write(
        package,
        {"engine/core.py": "import json\nimport pandas\n", "errors.py": "\nfrom . import engine, config\n"},
    )

    assert violations(package) == [
        "engine/core.py:2: pandas belongs in frames",
        "errors.py:2: errors may not import engine",
    ]
