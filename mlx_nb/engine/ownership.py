"""Which engine owns which model object: two that step one model would take its arrays from each other."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from ..errors import ModelOwnershipError

if TYPE_CHECKING:
    from .core import EngineCore
    from .worker import Worker

__all__ = ["claim", "reclaim", "release"]

# By id, since MLX modules are not hashable; an entry goes with its engine.
_owners: dict[int, weakref.ref[EngineCore]] = {}
_lock = threading.Lock()


def claim(model: Any, core: EngineCore, *, force: bool) -> Worker | None:
    """Make `core` the owner; the worker of the engine that was, which has been told to stop.

    Raises
    ------
    ModelOwnershipError
        When there is another owner and `force` is False.
    """
    with _lock:
        owner = _owner(id(model))
        worker = None
        if owner is not None:
            if not force:
                raise ModelOwnershipError(
                    f"{owner.engine_id} owns this model: close it first, or pass force_model_ownership=True"
                )
            worker = owner.stop_soon(
                ModelOwnershipError(f"{core.engine_id} took over the model of {owner.engine_id}")
            )
        _owners[id(model)] = weakref.ref(core)
        return worker


def reclaim(key: int | None, core: EngineCore) -> None:
    """Make sure that no other engine took the model over, or that it has let go of it since."""
    if key is None:
        return
    with _lock:
        owner = _owner(key)
        if owner is not None and owner is not core:
            raise ModelOwnershipError(f"{owner.engine_id} took this model over: close it first")
        _owners[key] = weakref.ref(core)


def release(core: EngineCore) -> None:
    """Forget what `core` owned."""
    with _lock:
        for key in [key for key, reference in _owners.items() if reference() in (core, None)]:
            del _owners[key]


def _owner(key: int) -> EngineCore | None:
    reference = _owners.get(key)
    return reference() if reference else None
