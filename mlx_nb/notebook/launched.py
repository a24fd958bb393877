"""``python -m mlx_nb kernel -n 2 -f FILE``: a kernel over several processes, for ``%mlx_engine start --distributed``.

mlx.launch starts them. The first is the kernel, the others follow what its engine does (`mlx_nb.follow`). Should one
of them die, the launcher wants to end the kernel as well; it stays, with all its variables, and its engine says what
happened.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ..errors import MlxNbError

__all__ = ["free_port", "install", "launch", "run"]


def launch(options: Sequence[str], arguments: Sequence[str]) -> None:
    """Become mlx.launch with these options, which runs kernels with these arguments. Doesn't return.

    The launcher reads what is typed, without a pause once that has ended, and a kernel's standard input has: so it
    gets one that never ends, since it holds the other side itself.
    """
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not launcher.exists():
        raise MlxNbError(f"there is no {launcher}: install mlx into this Python")
    typed, open_end = os.pipe()
    os.dup2(typed, 0)
    os.set_inheritable(open_end, True)
    command = [sys.executable, "-m", "mlx_nb", "kernel", *arguments]
    os.execv(launcher, [str(launcher), *options, "--", *command])


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def run(arguments: Sequence[str]) -> None:
    """Be the kernel, or follow it; `arguments` are ipykernel's."""
    from ..backends.distributed import follow, meet

    follow()
    meet()
    signal.signal(signal.SIGTERM, _stay_once)
    os.environ["JPY_PARENT_PID"] = str(os.getppid())  # the launcher, not who started that
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance(argv=list(arguments))


def install(name: str, options: Sequence[str]) -> Path:
    """Have Jupyter offer such a kernel under this name; the folder that says so."""
    from jupyter_client.kernelspec import KernelSpecManager

    spec = {
        "argv": [sys.executable, "-m", "mlx_nb", "kernel", *options, "-f", "{connection_file}"],
        "display_name": name,
        "language": "python",
        "interrupt_mode": "message",  # a signal would end the launcher
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        return Path(
            KernelSpecManager().install_kernel_spec(folder, name.lower().replace(" ", "-"), user=True)
        )


def _stay_once(signum: int, _frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.write(2, b"mlx_nb: another process of the model has ended; this kernel stays\n")
