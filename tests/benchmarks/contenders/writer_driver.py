"""No contender: the process that writes everybody's prompts, so that nobody's memory has a second tokenizer."""

from pathlib import Path
from typing import Any

from ..prompts import Writer
from ..work import Answer, Ask
from .driver import Driver


class Prompts(Driver):
    """A tokenizer alone."""

    def load(self, folder: Path, options: dict[str, Any]) -> None:
        self.writer = Writer(folder)

    def run(self, asks: list[Ask]) -> list[Answer]:
        raise NotImplementedError("the writer has no model")
