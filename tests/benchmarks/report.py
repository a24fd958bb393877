"""What every benchmark reports beside its figures: versions and the machine."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from mlx_nb import __version__


def machine() -> dict[str, Any]:
    """Return what figures depend on."""
    import mlx.core as mx

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: version(name) for name in ("mlx", "mlx-lm")},
        "mlx-nb": __version__,
        "device": {key: value for key, value in mx.device_info().items() if "name" in key},
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def report(**figures: Any) -> None:
    """Print one JSON object."""
    json.dump({**figures, "machine": machine()}, sys.stdout, indent=1)
    print()
