"""axe-core on a page: what would keep somebody with a screen reader or a keyboard from using it."""

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

_AXE = Path(__file__).parents[2] / "js" / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """async (selector) => (await axe.run(selector)).violations.map(
  (rule) => ({ rule: rule.id, nodes: rule.nodes.map((node) => `${node.html}: ${node.failureSummary}`) }),
)"""


def axe_violations(page: Page, selector: str) -> list[dict[str, Any]]:
    """What axe finds in the elements of `selector`; skips the test where `npm ci` was not run in js/."""
    if not _AXE.exists():
        reason = "axe-core is not there: npm --prefix js ci"
        pytest.fail(reason) if os.environ.get("MLX_NB_REQUIRE_BROWSER") == "1" else pytest.skip(reason)
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(_AXE.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate(_RUN, selector)
    return found
