"""One kernel a module, with the extension loaded and a fake engine that answers with the prompt, for ever."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kernel_session import KernelSession

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def kernel() -> "Iterator[KernelSession]":
    """A kernel that has run ``%load_ext mlx_nb`` and adopted a fake engine of 100 tokens/s."""
    from kernel_session import ENGINE, KernelSession

    session = KernelSession()
    try:
        for code in ("%load_ext mlx_nb", ENGINE):
            cell = session.run(code)
            assert cell.status == "ok", cell
        yield session
    finally:
        session.close()
