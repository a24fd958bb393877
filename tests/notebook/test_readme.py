"""The README's table of magics says what the magics' parsers say."""

import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mlx_nb.notebook.arguments import Options
from mlx_nb.notebook.batch import OPTIONS as BATCH
from mlx_nb.notebook.chat import CHAT
from mlx_nb.notebook.engine_options import COMMANDS
from mlx_nb.notebook.magics import GENERATE

README = Path(__file__).parent.parent.parent / "README.md"
ONE_LINE: dict[str, Options] = {"mlx_generate": GENERATE, "mlx_batch": BATCH, "mlx_chat": CHAT}
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def table() -> list[tuple[str, list[str], list[str]]]:
    """Of each row: the magic, the code in its first cell, and all of its flags."""
    rows = []
    for line in README.read_text("utf-8").splitlines():
        if line.startswith(("| `%mlx_", "| `%%mlx_")):
            first = re.findall(r"`([^`]+)`", line.split(" | ")[0])
            flags = [flag for code in re.findall(r"`([^`]+)`", line) for flag in FLAG.findall(code)]
            own = [flag for flag in flags if flag != "-m"]  # of `python -m`
            rows.append((first[0].lstrip("%").split()[0], first, own))
    return rows


def subcommands(code: list[str]) -> list[str]:
    """The subcommands that the first cell of a row of ``%mlx_engine`` names."""
    return [text.removeprefix("%mlx_engine ").split()[0] for text in code]


def test_every_option_in_the_table_exists() -> None:
    for magic, code, flags in table():
        parsers = (
            [COMMANDS[name] for name in subcommands(code)] if magic == "mlx_engine" else [ONE_LINE[magic]]
        )
        known = {flag for options in parsers for flag in options.flags}
        assert set(flags) <= known, magic


def test_every_subcommand_of_the_engine_magic_is_in_the_table() -> None:
    named = [name for magic, code, _ in table() if magic == "mlx_engine" for name in subcommands(code)]

    assert sorted(named) == sorted(COMMANDS)


def test_every_magic_is_in_the_table(shell: InteractiveShell) -> None:
    found: dict[str, dict[str, Any]] = shell.magics_manager.magics
    ours = {name for kind in found.values() for name in kind if name.startswith("mlx_")}

    assert {magic for magic, _, _ in table()} == ours == {"mlx_engine", *ONE_LINE}


@pytest.mark.parametrize("name", ["mlx_engine", *ONE_LINE])
def test_the_help_of_a_magic_names_every_option(shell: InteractiveShell, name: str) -> None:
    found = shell.magics_manager.magics
    magic = found["line"].get(name) or found["cell"][name]
    parsers = COMMANDS.values() if name == "mlx_engine" else [ONE_LINE[name]]

    for options in parsers:
        assert options.help() in (magic.__doc__ or "")
