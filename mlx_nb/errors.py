"""Every exception mlx_nb raises on purpose.

Each message is one line that says what happened and what to do next. Where a built-in exception is what
a caller would catch (ValueError, RuntimeError), ours derives from it as well.
"""

from __future__ import annotations

__all__ = [
    "CacheMismatchError",
    "CheckpointError",
    "EngineBusy",
    "EngineNotStarted",
    "EngineStopped",
    "MlxNbError",
    "ModelLoadError",
    "ModelOwnershipError",
    "RemoteError",
    "RequestError",
    "TemplateError",
    "UnknownModelError",
]


class MlxNbError(Exception):
    """Base of all errors of this package."""


class RequestError(MlxNbError, ValueError):
    """A request that can't be served as asked: refused before it is queued."""


class TemplateError(RequestError):
    """A prompt template that names something unknown, or doesn't parse."""


class EngineNotStarted(MlxNbError, RuntimeError):
    """The engine was used before ``start()``."""


class EngineStopped(MlxNbError, RuntimeError):
    """The engine stopped, or was closed, while the request was live."""


class EngineBusy(MlxNbError, RuntimeError):
    """The engine takes no further request now (``admission="fail"``)."""


class ModelOwnershipError(MlxNbError, RuntimeError):
    """Another engine owns this model object."""


class CacheMismatchError(MlxNbError, RuntimeError):
    """A saved prefix cache belongs to another model, tokenizer or adapter."""


class CheckpointError(MlxNbError, RuntimeError):
    """The checkpoint file of a job can't be used."""


class ModelLoadError(MlxNbError, RuntimeError):
    """A model could not be found, fetched, converted or loaded."""


class RemoteError(MlxNbError, RuntimeError):
    """A server can't be reached, refuses the key, fails, or says what can't be understood."""


class UnknownModelError(ModelLoadError, ValueError):
    """The name is no Hub id, folder, ``.gguf`` file or alias."""
