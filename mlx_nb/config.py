"""What an engine is told once, when it is made. Validated on construction, never mutated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .validation import between, choice, flag, integer, number

__all__ = ["DraftKind", "EngineConfig", "SchedulerConfig", "SingleStream", "SparsePrefill", "Speculation"]

DraftKind = Literal["model", "prompt_lookup", "drafter", "mtp", "dflash", "eagle3"]
DRAFTERS = ("drafter", "mtp", "dflash", "eagle3")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How requests are admitted, batched and cached.

    Parameters
    ----------
    max_num_seqs, completion_batch_size : int
        Rows that run at once: the smaller of the two.
    max_num_batched_tokens : int
        Prompt tokens admitted to prefill together; a longer prompt is admitted alone.
    prefill_batch_size : int
        Prompts prefilled together.
    prefill_step_size : int
        Upper bound of a prefill chunk, in tokens a row. The chunk adapts so that one takes about 0.5 s at most.
    policy : {"fcfs", "priority"}
        Order of admission. With "priority" a lower ``priority`` of a request goes first.
    enable_prefix_cache : bool
        Keep the KV state of finished requests for prompts that begin alike.
    cache_memory_mb, cache_memory_percent : float
        Budget of the prefix cache: MiB, or else a share (0 to 1) of the memory limit.
    kv_cache_quantization, kv_cache_quantization_bits, kv_cache_quantization_group_size
        Quantise stored prefixes (lossy: text after a cache hit may differ).
    max_kv_size : int
        Bound of a row's KV cache in tokens; 0 means none.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_batch_size: int = 8
    completion_batch_size: int = 32
    prefill_step_size: int = 2048
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_cache: bool = True
    cache_memory_mb: float | None = None
    cache_memory_percent: float = 0.20
    kv_cache_quantization: bool = False
    kv_cache_quantization_bits: int = 8
    kv_cache_quantization_group_size: int = 64
    max_kv_size: int = 0

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "prefill_batch_size",
            "completion_batch_size",
            "prefill_step_size",
        ):
            integer(name, getattr(self, name), low=1)
        choice("policy", self.policy, ("fcfs", "priority"))
        flag("enable_prefix_cache", self.enable_prefix_cache)
        if self.cache_memory_mb is not None:
            number("cache_memory_mb", self.cache_memory_mb, low=0)
        between("cache_memory_percent", self.cache_memory_percent, 0, 1)
        flag("kv_cache_quantization", self.kv_cache_quantization)
        choice("kv_cache_quantization_bits", self.kv_cache_quantization_bits, (2, 3, 4, 6, 8))
        choice("kv_cache_quantization_group_size", self.kv_cache_quantization_group_size, (32, 64, 128))
        integer("max_kv_size", self.max_kv_size, low=0)

    @property
    def max_running(self) -> int:
        """Rows that may run at once."""
        return min(self.max_num_seqs, self.completion_batch_size)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    Parameters
    ----------
    model_name : str
        Shown in statistics and messages.
    scheduler_config : SchedulerConfig, optional
    step_interval : float
        Seconds; outputs of steps closer together than this reach an event loop in one wake-up.
    stream_interval : int
        Tokens per streamed delta. The last delta is always sent.
    gpu_memory_utilization : float
        Share (0 to 1] of the device's memory that model, KV and caches may use.
    idle_unload_s : float, optional
        Seconds without a request after which the model leaves memory; the next request loads it again.
    """

    model_name: str = ""
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    step_interval: float = 0.001
    stream_interval: int = 1
    gpu_memory_utilization: float = 0.9
    idle_unload_s: float | None = None

    def __post_init__(self) -> None:
        if self.scheduler_config is None:
            object.__setattr__(self, "scheduler_config", SchedulerConfig())
        if not isinstance(self.scheduler_config, SchedulerConfig):
            raise ValueError("scheduler_config must be a SchedulerConfig or None")
        if not isinstance(self.model_name, str):
            raise ValueError(f"model_name must be a text, got {self.model_name!r}")
        number("step_interval", self.step_interval, low=0)
        integer("stream_interval", self.stream_interval, low=1)
        between("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1)
        if self.idle_unload_s is not None:
            number("idle_unload_s", self.idle_unload_s, low=0)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Where a single stream gets its guesses from.

    Parameters
    ----------
    kind : {"model", "prompt_lookup", "drafter", "mtp", "dflash", "eagle3"}
        A smaller language model of the same vocabulary; the text so far; or a drafter that was trained for the model,
        of whatever kind or of this one.
    model : str, optional
        The smaller model or the drafter: Hub id, folder, alias. Not for "prompt_lookup". "mtp" without one goes by
        the prediction heads that the model comes with.
    tokens : int, optional
        Guesses a step; None leaves it to the kind.
    """

    kind: DraftKind
    model: str | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        choice("kind", self.kind, ("model", "prompt_lookup", *DRAFTERS))
        if self.kind == "prompt_lookup" and self.model is not None:
            raise ValueError("prompt_lookup needs no draft model: leave it out")
        alone = self.kind in ("prompt_lookup", "mtp") and self.model is None
        if not alone and not (isinstance(self.model, str) and self.model):
            raise ValueError(f"draft kind {self.kind!r} needs a draft model, got {self.model!r}")
        if self.tokens is not None:
            integer("draft tokens", self.tokens, low=1, high=64)

    @property
    def trained(self) -> bool:
        """Whether the guesses come from a drafter that was trained for the model."""
        return self.kind in DRAFTERS

    @property
    def by_heads(self) -> bool:
        """Whether they come from prediction heads of the model's own."""
        return self.kind == "mtp" and self.model is None


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """Prefill of the parts of a long prompt that matter (SpecPrefill, arXiv:2502.02789): an approximation.

    Parameters
    ----------
    threshold : int
        Tokens from which on it is done, those of a stored prefix not counted.
    keep_pct : float
        Share (0 to 1] of the prompt's chunks that is prefilled.
    backbone_pct : float
        Share [0, 1] of the chunks that is kept whatever they say, spread evenly; part of `keep_pct`.
    """

    threshold: int = 8192
    keep_pct: float = 0.3
    backbone_pct: float = 0.0

    def __post_init__(self) -> None:
        integer("specprefill_threshold", self.threshold, low=0)
        between("specprefill_keep_pct", self.keep_pct, 0, 1)
        between("specprefill_backbone_pct", self.backbone_pct, 0, 1)
        if not self.keep_pct:
            raise ValueError("specprefill_keep_pct must be above 0 and at most 1, got 0")
        if self.backbone_pct > self.keep_pct:
            raise ValueError(
                f"specprefill_backbone_pct ({self.backbone_pct}) is part of specprefill_keep_pct ({self.keep_pct}) "
                "and can't be more"
            )


@dataclass(frozen=True, slots=True)
class SingleStream:
    """An engine that runs one request at a time, and what makes that one faster.

    Parameters
    ----------
    speculation : Speculation, optional
    sparse_draft_model : str, optional
        The model that chooses what a `SparsePrefill` keeps: Hub id, folder, alias.
    sparse_prefill : SparsePrefill, optional
        For the requests that say nothing of their own.
    """

    speculation: Speculation | None = None
    sparse_draft_model: str | None = None
    sparse_prefill: SparsePrefill | None = None

    def __post_init__(self) -> None:
        if self.sparse_prefill is not None and self.sparse_draft_model is None:
            raise ValueError("SpecPrefill needs a draft model, a smaller one of the same vocabulary")
        if self.sparse_draft_model is not None and self.speculation is not None and self.speculation.trained:
            raise ValueError(
                "SpecPrefill doesn't go with a trained drafter, which has to see the whole prompt"
            )
