"""From a MODEL string to a backend, on the thread that will step it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import EngineConfig
from ..outputs import LoadProgress
from . import fit, sources
from .base import Backend, ModelInfo

__all__ = ["Pretrained"]


class Pretrained:
    """A `BackendFactory` for a Hub id, folder, ``.gguf`` file, alias or "demo".

    Keeps nothing loaded itself, so that stopping an engine frees its model.

    Raises
    ------
    UnknownModelError
        On construction, for a name that is none of these.
    """

    def __init__(
        self, model: str, *, adapter_path: str | Path | None = None, trust_remote_code: bool = False
    ) -> None:
        self._source = sources.resolve(model)
        self._adapter_path = adapter_path
        self._trust_remote_code = trust_remote_code

    @property
    def name(self) -> str:
        """The model's name for people."""
        return self._source.name

    def __call__(self, config: EngineConfig, on_progress: Callable[[LoadProgress], None]) -> Backend:
        """Fetch, load, and wrap."""
        from . import loader

        share = config.gpu_memory_utilization
        path = sources.fetch(self._source, on_progress, memory_share=share)
        needed = fit.needs_of(path, float32=loader.half_precision_is_emulated())
        if needed is not None:
            fit.require_memory(self.name, needed, share)
        loaded = loader.load(
            path,
            adapter_path=self._adapter_path,
            trust_remote_code=self._trust_remote_code,
            on_progress=on_progress,
        )
        from .batch import BatchBackend

        info = ModelInfo(
            name=config.model_name or self.name,
            precision=loaded.precision,
            backend=loaded.backend,
            weight_bytes=loaded.weight_bytes,
            context_length=loaded.context_length,
            fingerprint=loaded.fingerprint,
            notes=loaded.notes,
        )
        return BatchBackend(loaded.model, loaded.tokenizer, config, info)
