"""Drives a real JupyterLab in headless Chromium: one server and one browser for a test session."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Locator, Page, sync_playwright

TOKEN = "browser-test"
START_SECONDS = 60.0
BROWSER_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
IDLE = """() => {
  const kernel = window.jupyterapp?.shell?.currentWidget?.context?.sessionContext?.session?.kernel;
  return kernel && kernel.status === 'idle' && kernel.connectionStatus === 'connected';
}"""
RUN_CELL = """(index) => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  notebook.activeCellIndex = index;
  notebook.deselectAll();
  window.jupyterapp.commands.execute('notebook:run-cell');
}"""
COMMAND = "([id, options]) => window.jupyterapp.commands.execute(id, options).then(() => true)"


class Notebook:
    """A notebook open in JupyterLab; its cells are numbered from 0."""

    def __init__(self, page: Page, path: Path, pictures: Path) -> None:
        self.page = page
        self.path = path
        self._pictures = pictures

    def cell(self, index: int) -> Locator:
        return self.page.locator(".jp-Notebook .jp-Cell").nth(index)

    def run(self, index: int, wait: bool = True, seconds: float = 20) -> None:
        """Run a cell; with `wait`, until it has an execution number and no error."""
        self.page.evaluate(RUN_CELL, index)
        if wait:
            self.wait_done(index, seconds)

    def is_busy(self, index: int) -> bool:
        return "[*]" in (self.cell(index).locator(".jp-InputPrompt").text_content() or "")

    def wait_done(self, index: int, seconds: float = 20) -> None:
        prompt = self.cell(index).locator(".jp-InputPrompt")
        end = time.monotonic() + seconds
        while not re.search(r"\[\d+\]", prompt.text_content() or ""):
            assert time.monotonic() < end, f"cell {index} still runs: {self.cell(index).inner_text()}"
            self.page.wait_for_timeout(50)
        error = self.cell(index).locator(
            "[data-mime-type='application/vnd.jupyter.stderr'], .jp-RenderedText"
        )
        for text in error.all_text_contents():
            assert "Traceback" not in text, text

    def command(self, name: str, **options: object) -> None:
        """Execute one of JupyterLab's commands."""
        self.page.evaluate(COMMAND, [name, options])

    def save(self) -> nbformat.NotebookNode:
        """Save, and return what is on disk."""
        self.command("docmanager:save")
        return nbformat.read(self.path, as_version=4)

    def picture(self, name: str, of: Locator | None = None) -> Path:
        """Take a screenshot of a part, or of the whole page."""
        path = self._pictures / f"{name}.png"
        if of is None:
            self.page.screenshot(path=path)
        else:
            of.screenshot(path=path)
        return path


class Lab:
    """A running JupyterLab and the browser that looks at it."""

    def __init__(self, browser: Browser, url: str, root: Path, pictures: Path) -> None:
        self._browser = browser
        self._url = url
        self._root = root
        self._pictures = pictures

    @contextlib.contextmanager
    def notebook(self, name: str, cells: Sequence[str]) -> Iterator[Notebook]:
        """Write a notebook, and open it with a kernel."""
        node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        node.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        with self.open(name, node, kernel=True) as notebook:
            yield notebook

    @contextlib.contextmanager
    def open(self, name: str, node: nbformat.NotebookNode, *, kernel: bool) -> Iterator[Notebook]:
        """Open a notebook; without `kernel`, as it comes from somebody else."""
        path = self._root / f"{name}.ipynb"
        if not kernel:
            node.metadata.pop("kernelspec", None)
        nbformat.write(node, path)
        page = self._browser.new_page(viewport={"width": 1280, "height": 900})
        try:
            page.goto(f"{self._url}/lab/workspaces/{name}/tree/{path.name}?token={TOKEN}&reset")
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
            if kernel:
                page.wait_for_function(IDLE, timeout=60_000)
            page.evaluate(COMMAND, ["application:toggle-left-area", {}])
            yield Notebook(page, path, self._pictures)
        finally:
            with contextlib.suppress(Exception):
                page.evaluate("window.jupyterapp.serviceManager.sessions.shutdownAll()")
            page.close()


@contextlib.contextmanager
def running_lab(chromium: str, root: Path, pictures: Path, python_path: Sequence[Path]) -> Iterator[Lab]:
    """Start JupyterLab in `root` and a browser; end both."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log = root / "server.log"
    home = root / "jupyter"
    notebooks = root / "notebooks"
    notebooks.mkdir()
    settings = home / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    no_news = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(no_news), encoding="utf-8")
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "PYTHONPATH": os.pathsep.join([*map(str, python_path), os.environ.get("PYTHONPATH", "")]).strip(
            os.pathsep
        ),
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                "--ServerApp.ip=127.0.0.1",
                f"--ServerApp.port={port}",
                "--ServerApp.port_retries=0",
                f"--ServerApp.root_dir={notebooks}",
                f"--IdentityProvider.token={TOKEN}",
                "--LabApp.expose_app_in_browser=True",
                "--LabApp.news_url=",
                "--LabApp.extension_manager=readonly",
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_up(server, f"{url}/api/status?token={TOKEN}", log)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGUMENTS)
            try:
                yield Lab(browser, url, notebooks, pictures)
            finally:
                browser.close()
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_up(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-2000:]}")
