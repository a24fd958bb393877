"""A batch whose steps don't depend on the clock, for processes that must all make the same ones."""

from __future__ import annotations

from typing import Any

from .batch import BatchBackend
from .generator import Generator

__all__ = ["SteadyBatch"]


class SteadyBatch(BatchBackend):
    """Prefills in chunks of `prefill_step_size`, whatever time they take."""

    def _make_generator(self, *args: Any) -> Generator:
        generator = super()._make_generator(*args)
        generator.prefill_step_size = self._config.scheduler_config.prefill_step_size
        generator.adapts = False
        return generator
