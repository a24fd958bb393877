"""Language models on MLX inside the notebook kernel.

Names load when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import engine as _engine

__version__ = "0.1.0"

_HOMES = {
    "AsyncEngineCore": ".engine.async_core",
    "CacheMismatchError": ".errors",
    "ChatPanel": ".widgets.chat",
    "CheckpointError": ".errors",
    "Conversation": ".session.conversation",
    "EngineBusy": ".errors",
    "EngineConfig": ".config",
    "EngineCore": ".engine.core",
    "EngineNotStarted": ".errors",
    "EngineStopped": ".errors",
    "GenerationCancelled": ".frames.results",
    "GenerationInterrupted": ".frames.results",
    "GenerationOutput": ".outputs",
    "LoadProgress": ".outputs",
    "MlxNbError": ".errors",
    "ModelLoadError": ".errors",
    "ModelOwnershipError": ".errors",
    "Preview": ".frames.preview",
    "RemoteError": ".errors",
    "RequestError": ".errors",
    "RequestOutput": ".outputs",
    "RequestStatus": ".request",
    "SamplingParams": ".sampling",
    "SchedulerConfig": ".config",
    "SimpleEngine": ".session.simple",
    "SingleStream": ".config",
    "SparsePrefill": ".config",
    "Speculation": ".config",
    "TemplateError": ".errors",
    "TokenLogprob": ".outputs",
    "TokensView": ".widgets.tokens",
    "UnknownModelError": ".errors",
    "Workers": ".frames.dask_workers",
    "achat": ".session.api",
    "aclassify_frame": ".frames.tools",
    "aextract_frame": ".frames.tools",
    "agenerate": ".session.api",
    "agenerate_frame": ".frames.generate",
    "ascore_frame": ".frames.scoring",
    "chat": ".session.api",
    "classify_frame": ".frames.tools",
    "col": ".frames.options",
    "connect": ".session.api",
    "conversation": ".session.conversation",
    "count_tokens": ".session.api",
    "current_engine": ".session.session",
    "extract_frame": ".frames.tools",
    "follow": ".backends.distributed",
    "generate": ".session.api",
    "generate_frame": ".frames.generate",
    "load_ipython_extension": ".notebook.extension",
    "preview_frame": ".frames.preview",
    "score_frame": ".frames.scoring",
    "start": ".session.api",
    "start_workers": ".frames.dask_workers",
    "stop": ".session.api",
    "unload_ipython_extension": ".notebook.extension",
}

__all__ = sorted([*_HOMES, "__version__"])

if TYPE_CHECKING:
    from .backends.distributed import follow as follow
    from .config import EngineConfig as EngineConfig
    from .config import SchedulerConfig as SchedulerConfig
    from .config import SingleStream as SingleStream
    from .config import SparsePrefill as SparsePrefill
    from .config import Speculation as Speculation
    from .engine.async_core import AsyncEngineCore as AsyncEngineCore
    from .engine.core import EngineCore as EngineCore
    from .errors import CacheMismatchError as CacheMismatchError
    from .errors import CheckpointError as CheckpointError
    from .errors import EngineBusy as EngineBusy
    from .errors import EngineNotStarted as EngineNotStarted
    from .errors import EngineStopped as EngineStopped
    from .errors import MlxNbError as MlxNbError
    from .errors import ModelLoadError as ModelLoadError
    from .errors import ModelOwnershipError as ModelOwnershipError
    from .errors import RemoteError as RemoteError
    from .errors import RequestError as RequestError
    from .errors import TemplateError as TemplateError
    from .errors import UnknownModelError as UnknownModelError
    from .frames.dask_workers import Workers as Workers
    from .frames.dask_workers import start_workers as start_workers
    from .frames.generate import agenerate_frame as agenerate_frame
    from .frames.generate import generate_frame as generate_frame
    from .frames.options import col as col
    from .frames.preview import Preview as Preview
    from .frames.preview import preview_frame as preview_frame
    from .frames.results import GenerationCancelled as GenerationCancelled
    from .frames.results import GenerationInterrupted as GenerationInterrupted
    from .frames.scoring import ascore_frame as ascore_frame
    from .frames.scoring import score_frame as score_frame
    from .frames.tools import aclassify_frame as aclassify_frame
    from .frames.tools import aextract_frame as aextract_frame
    from .frames.tools import classify_frame as classify_frame
    from .frames.tools import extract_frame as extract_frame
    from .notebook.extension import load_ipython_extension as load_ipython_extension
    from .notebook.extension import unload_ipython_extension as unload_ipython_extension
    from .outputs import GenerationOutput as GenerationOutput
    from .outputs import LoadProgress as LoadProgress
    from .outputs import RequestOutput as RequestOutput
    from .outputs import TokenLogprob as TokenLogprob
    from .request import RequestStatus as RequestStatus
    from .sampling import SamplingParams as SamplingParams
    from .session.api import achat as achat
    from .session.api import agenerate as agenerate
    from .session.api import chat as chat
    from .session.api import connect as connect
    from .session.api import count_tokens as count_tokens
    from .session.api import generate as generate
    from .session.api import start as start
    from .session.api import stop as stop
    from .session.conversation import Conversation as Conversation
    from .session.conversation import conversation as conversation
    from .session.session import current_engine as current_engine
    from .session.simple import SimpleEngine as SimpleEngine
    from .widgets.chat import ChatPanel as ChatPanel
    from .widgets.tokens import TokensView as TokensView


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _EnginePackage(ModuleType):
    """The sub-package of that name, and the function: ``mlx_nb.engine()`` is the engine in use.

    Both are promised, and importing the one would hide the other.
    """

    def __call__(self, name: str | None = None) -> Any:
        """As `current_engine`."""
        return __getattr__("current_engine")(name)


_engine.__class__ = _EnginePackage


def _say_what_is_missing() -> None:
    """Warn, where MLX has no back end, which extra brings one: all but running a model works without."""
    from .backends import cpu_blas

    try:
        cpu_blas.require_backend()
    except ImportError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


if sys.platform == "linux":
    _say_what_is_missing()
