"""What every kind of test shares."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlx_nb.backends import cpu_blas

cpu_blas.prepare()  # before any test file imports mlx, or the CPU's real models are ten times slower

if TYPE_CHECKING:
    from mlx_server import MlxServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC_BROWSERS = (
    Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
    Path("/Applications/Chromium.app/Contents/MacOS/Chromium"),
)


def installed_browser() -> str | None:
    """Return the path of a Chromium on this computer, or None."""
    on_path = [found for name in BROWSERS if (found := shutil.which(name))]
    in_applications = [str(path) for path in MAC_BROWSERS if sys.platform == "darwin" and path.exists()]
    return next(iter(on_path + in_applications), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser to drive; without one the test is skipped, or fails where a browser is required."""
    browser = installed_browser()
    if browser is None:
        missing = f"no browser on this computer (looked for {', '.join(BROWSERS)})"
        if os.environ.get("MLX_NB_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return browser


@pytest.fixture(scope="session")
def mlx_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[MlxServer]":
    """mlx_lm.server with a tiny model; a test that kills it starts it again."""
    from mlx_server import MlxServer
    from models import tiny_folder

    server = MlxServer(tiny_folder(), tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()
