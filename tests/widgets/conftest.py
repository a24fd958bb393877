"""Lets the widget tests import their stand-in engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
