"""``python -m mlx_nb demo`` runs the first notebook in a real kernel, shows what came out and keeps it as a page.

``python -m mlx_nb doctor`` says what this installation lacks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import MlxNbError

NOTEBOOK = "01_first_steps.ipynb"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def main(arguments: list[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mlx_nb", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="run the first notebook on a small real model")
    demo_parser.add_argument(
        "--out", type=Path, default=Path("mlx_nb_demo"), help="folder for the executed notebook and the page"
    )
    commands.add_parser("doctor", help="say what this installation lacks, and the command that mends it")
    options = parser.parse_args(arguments)
    try:
        if options.command == "doctor":
            return doctor()
        demo(options.out)
    except (MlxNbError, OSError) as error:
        print(f"mlx_nb: {error}", file=sys.stderr)
        return 1
    return 0


def doctor() -> int:
    """Print what `mlx_nb.session.doctor` finds; 1 if something keeps an engine from working."""
    from .session.doctor import examine, report

    findings = examine()
    print(report(findings))
    return int(any(finding.status == "problem" for finding in findings))


def demo(out: Path) -> None:
    """Execute the notebook, print its cells and outputs, and write ``out/01_first_steps.{ipynb,html}``."""
    try:
        import nbclient
        import nbconvert
        import nbformat
    except ImportError as error:
        raise MlxNbError(f"the demo needs {error.name}: pip install 'mlx-nb[lab]'") from error

    notebook = nbformat.read(_notebook(), as_version=4)  # type: ignore[no-untyped-call]
    out.mkdir(parents=True, exist_ok=True)
    print(f"Running {NOTEBOOK} in a kernel (the first run fetches a model of 93 MB) …\n", flush=True)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of what every kernel on TCP does
        timeout=None,
        store_widget_state=True,
        resources={"metadata": {"path": str(out)}},
        on_cell_executed=lambda **executed: _show(executed["cell"]),
    )
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise MlxNbError(f"a cell failed: {_ANSI.sub('', str(error)).strip().splitlines()[-1]}") from error
    finally:
        nbformat.write(notebook, out / NOTEBOOK)  # type: ignore[no-untyped-call]
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)  # type: ignore[no-untyped-call]
    (out / NOTEBOOK).with_suffix(".html").write_text(page, encoding="utf-8")
    print(f"Left {out / NOTEBOOK} and {(out / NOTEBOOK).with_suffix('.html')}.")


def _notebook() -> Path:
    """In the wheel it lies beside this file, in a checkout one folder up."""
    here = Path(__file__).resolve().parent
    for folder in (here / "notebooks", here.parent / "notebooks"):
        if (folder / NOTEBOOK).exists():
            return folder / NOTEBOOK
    raise MlxNbError(f"{NOTEBOOK} is missing from this installation: install mlx-nb again")


def _show(cell: Any) -> None:
    if cell.cell_type != "code":
        return
    print("\n".join(f"> {line}" for line in cell.source.splitlines()))
    for text in _texts(cell.outputs):
        print(_ANSI.sub("", text).rstrip())
    print(flush=True)


def _texts(outputs: list[Any]) -> Iterator[str]:
    for output in outputs:
        if output.output_type == "stream":
            if output.name == "stdout":
                yield output.text
        elif output.output_type == "error":
            yield f"{output.ename}: {output.evalue}"
        elif "text/plain" in output.data:
            yield output.data["text/plain"]


if __name__ == "__main__":
    sys.exit(main())
