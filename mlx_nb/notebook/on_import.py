"""Something to do once a library that isn't loaded yet is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["OnImport"]

_log = logging.getLogger("mlx_nb")


class OnImport(importlib.abc.MetaPathFinder):
    """Calls `then` once the module `name` was imported: now if it is there, or else when someone imports it.

    A failure of `then` is logged; it must not break the import of an innocent library.

    Attributes
    ----------
    name : str
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self._then = name, then
        if name in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Forget about it. Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Part of the import protocol: leave the finding to others, and listen to the loading."""
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Listening(spec.loader, self._call)
        return spec

    def _call(self) -> None:
        self.remove()
        try:
            self._then()
        except Exception:
            _log.warning("mlx_nb: what was to follow the import of %s failed", self.name, exc_info=True)


class _Listening(importlib.abc.Loader):
    """A loader that tells when it is done, and steps aside."""

    def __init__(self, loader: importlib.abc.Loader, done: Callable[[], None]) -> None:
        self._loader, self._done = loader, done

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader (resources, say) gets the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done()
