"""One JupyterLab and one browser for a file of browser tests."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lab import Lab

HERE = Path(__file__).parent
NEEDED = ("jupyterlab", "playwright", "nbformat", "ipykernel", "anywidget")

sys.path.insert(0, str(HERE))


# Not for the whole session: Playwright keeps a loop running in this thread, and asyncio tests follow.
@pytest.fixture(scope="module")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Lab"]:
    """A running JupyterLab, whose kernels can import the stand-in engine of the widget tests."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"not installed: {', '.join(missing)} (they are in the extra `dev`)"
        if os.environ.get("MLX_NB_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    from lab import running_lab

    asked = os.environ.get("MLX_NB_SCREENSHOTS")
    pictures = Path(asked) if asked else tmp_path_factory.mktemp("screenshots")
    pictures.mkdir(parents=True, exist_ok=True)
    python_path = [HERE.parents[1], HERE.parent / "widgets"]
    with running_lab(chromium, tmp_path_factory.mktemp("lab"), pictures, python_path) as running:
        yield running
