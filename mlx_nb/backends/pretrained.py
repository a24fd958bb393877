"""From a MODEL string to a backend, on the thread that will step it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig, SingleStream, Speculation
from ..errors import ModelLoadError
from ..outputs import LoadProgress
from . import fit, sources
from .base import Backend, ModelInfo

if TYPE_CHECKING:
    from .drafts import Draft
    from .loader import LoadedModel

__all__ = ["Pretrained"]

DRAFT_TOKENS = 4
"""Guesses a step, unless it is said."""


class Pretrained:
    """A `BackendFactory` for a Hub id, folder, ``.gguf`` file, alias or "demo".

    Keeps nothing loaded itself, so that stopping an engine frees its model. With `single` the backend runs one
    request at a time.

    Raises
    ------
    UnknownModelError
        On construction, for a name that is none of these.
    """

    def __init__(
        self,
        model: str,
        *,
        adapter_path: str | Path | None = None,
        trust_remote_code: bool = False,
        single: SingleStream | None = None,
    ) -> None:
        self._source = sources.resolve(model)
        self._adapter_path = adapter_path
        self._trust_remote_code = trust_remote_code
        self._single = single
        speculation = single.speculation if single else None
        self._trained = speculation is not None and speculation.trained
        self._by_heads = speculation is not None and speculation.by_heads
        for draft in _drafts(single):
            sources.resolve(draft)
        if self._trained and adapter_path is not None:
            raise ValueError("a drafter is trained for the model without an adapter: leave one of them out")

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
        if self._by_heads:
            from .drafters import require_heads

            require_heads(path, self.name)
        loaded = loader.load(
            path,
            adapter_path=self._adapter_path,
            trust_remote_code=self._trust_remote_code,
            reveals=self._trained,
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
            takes_images=loaded.reader is not None,
            takes_videos=loaded.reader is not None and loaded.reader.takes_videos,
        )
        if self._single is not None:
            return self._single_stream(loaded, config, info, on_progress)
        return BatchBackend(loaded.model, loaded.tokenizer, config, info, loaded.reader)

    def _single_stream(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        info: ModelInfo,
        on_progress: Callable[[LoadProgress], None],
    ) -> Backend:
        from .single import SingleBackend

        assert self._single is not None
        speculation, scorer = self._single.speculation, self._single.sparse_draft_model
        draft, usual = (None, 0) if speculation is None else self._draft(speculation, loaded, on_progress)
        return SingleBackend(
            loaded.model,
            loaded.tokenizer,
            config,
            info,
            loaded.reader,
            draft=draft,
            draft_tokens=(speculation and speculation.tokens) or usual,
            sparse_prefill=self._single.sparse_prefill,
            scorer=None if scorer is None else self._helper(scorer, loaded, on_progress),
        )

    def _draft(
        self, speculation: Speculation, target: LoadedModel, on_progress: Callable[[LoadProgress], None]
    ) -> tuple[Draft, int]:
        """The draft, and how many guesses a step it makes unless it is said."""
        from .drafts import ModelDraft, PromptLookup

        if speculation.kind == "prompt_lookup":
            return PromptLookup(), DRAFT_TOKENS
        if speculation.kind == "model":
            assert speculation.model is not None
            return ModelDraft(self._helper(speculation.model, target, on_progress)), DRAFT_TOKENS
        from .drafters import load_drafter

        path, name = target.path, self.name
        if speculation.model is not None:
            source = sources.resolve(speculation.model)
            path, name = sources.fetch(source, on_progress), source.name
        kind = None if speculation.kind == "drafter" else speculation.kind
        return load_drafter(path, kind, target.model, name, trust_remote_code=self._trust_remote_code)

    def _helper(self, name: str, target: LoadedModel, on_progress: Callable[[LoadProgress], None]) -> Any:
        """A smaller model that reads the target's tokens; the target itself if it is the same."""
        from . import loader

        source = sources.resolve(name)
        if source == self._source and self._adapter_path is None:
            return target.model
        path = sources.fetch(source, on_progress)
        helper = loader.load(
            path, trust_remote_code=self._trust_remote_code, text_only=True, on_progress=on_progress
        )
        ours, theirs = (each.tokenizer for each in (target, helper))
        if ours.get_vocab() != theirs.get_vocab():
            raise ModelLoadError(
                f"the draft model {source.name} has another vocabulary than {self.name}: choose one of its family"
            )
        return helper.model


def _drafts(single: SingleStream | None) -> list[str]:
    """The models beside the target."""
    if single is None:
        return []
    speculation = single.speculation
    names = [speculation.model if speculation else None, single.sparse_draft_model]
    return [name for name in names if name is not None]
