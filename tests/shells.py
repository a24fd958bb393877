"""IPython shells for tests that leave nothing behind for the end of the process."""

import atexit
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def begin() -> Any:
    """Return a new shell, the only one of its kind."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    return InteractiveShell.instance(config=config)


def end(shell: Any) -> None:
    """End a shell: for each that is left at exit IPython collects all garbage, which takes a minute or two in all."""
    atexit.unregister(shell.atexit_operations)
    InteractiveShell.clear_instance()
