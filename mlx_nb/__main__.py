"""``python -m mlx_nb demo`` runs the first notebook in a real kernel, shows what came out and keeps it as a page.

``python -m mlx_nb doctor`` says what this installation lacks.

``python -m mlx_nb kernel -n 2 --install NAME`` makes a Jupyter kernel over several processes, for models that are
divided among them.
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
    kernel_parser = commands.add_parser(
        "kernel", help="a Jupyter kernel over several processes (mlx.launch)", allow_abbrev=False
    )
    kernel_parser.add_argument("-n", dest="processes", type=int, help="processes on this machine")
    kernel_parser.add_argument(
        "--hostfile", help="or those of the machines that mlx.launch finds in this file"
    )
    kernel_parser.add_argument("--backend", default="ring", help="how they talk: ring, jaccl, nccl, mpi")
    kernel_parser.add_argument("--starting-port", type=int, help="first port of the ring on each machine")
    kernel_parser.add_argument("--install", metavar="NAME", help="have Jupyter offer it under this name")
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "kernel":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "kernel":
            return kernel(options, rest)
        if options.command == "doctor":
            return doctor()
        demo(options.out)
    except (MlxNbError, OSError) as error:
        print(f"mlx_nb: {error}", file=sys.stderr)
        return 1
    return 0


def kernel(options: argparse.Namespace, rest: list[str]) -> int:
    """Install such a kernel, launch it, or be one of its processes; `rest` goes to ipykernel."""
    try:
        return _kernel(options, rest)
    except ImportError as error:
        raise MlxNbError(f"a kernel needs {error.name}: pip install 'mlx-nb[lab]'") from error


def _kernel(options: argparse.Namespace, rest: list[str]) -> int:
    from .notebook import launched

    if options.processes is None and options.hostfile is None:
        if options.install is not None:
            raise MlxNbError("how many processes? give -n 2, or a --hostfile")
        launched.run(rest)
        return 0
    where = ["-n", str(options.processes)] if options.hostfile is None else ["--hostfile", options.hostfile]
    where += ["--backend", options.backend]
    where += [] if options.starting_port is None else ["--starting-port", str(options.starting_port)]
    if options.install is None:
        if options.hostfile is None and options.starting_port is None:
            where += ["--starting-port", str(launched.free_port())]  # another kernel may have the usual one
        launched.launch(where, rest)
    else:
        print(f"Jupyter offers {options.install!r}: {launched.install(options.install, where)}")
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
