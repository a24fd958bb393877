"""Print the shell command that README.md marks with `<!-- command: NAME -->`: CI runs what people run.

usage: python3 .ci/readme_command.py NAME
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str) -> str:
    """Return the one line in the fenced block that follows the mark."""
    pattern = rf"^<!-- command: {re.escape(name)} -->\n+```\w*\n(.+)\n```$"
    found: list[str] = re.findall(pattern, README.read_text(encoding="utf-8"), re.MULTILINE)
    if len(found) != 1:
        sys.exit(f"README.md should mark one one-line command '{name}', but marks {len(found)}")
    return found[0]


if __name__ == "__main__":
    print(command(*sys.argv[1:]))
