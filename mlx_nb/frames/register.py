"""``df.mlx`` from the moment pandas is there, without importing pandas for it."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register_accessors"]


def register_accessors() -> None:
    """Register the accessors: now if pandas is loaded, or else as soon as somebody imports it."""
    if "pandas" in sys.modules:
        from . import accessor  # noqa: F401 - importing registers
    elif not any(isinstance(finder, _PandasWatch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PandasWatch())


class _PandasWatch(MetaPathFinder):
    """Sees the first import of pandas, leaves it to the other finders, and steps out of the way."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname != "pandas":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Another loader, and then the registration."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks pandas for its loader (resources, reload) gets its own.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        register_accessors()
