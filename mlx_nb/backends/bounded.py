"""Caches of at most so many tokens: the first few stay, the others leave in the order they came.

Keeping the first tokens ("attention sinks") is what lets a model go on after the others have left (Xiao et al. 2023,
arXiv:2309.17453).
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..errors import ModelLoadError
from .caches import is_recurrent

__all__ = ["SINKS", "bounded_cache"]

SINKS = 4
"""Tokens at the beginning that stay, as in mlx-lm's single-stream cache."""


def bounded_cache(model: Any, size: int) -> list[Any]:
    """Caches of `model` in which no attention layer keeps more than `size` tokens.

    mlx-lm leaves models that make their own caches unbounded; here each of their layers is bounded as well. A sliding
    window that is smaller stays as it is, and so does the state of a recurrent layer.

    Raises
    ------
    ModelLoadError
        For a kind of cache that can't be bounded.
    """
    if size <= SINKS:
        raise ModelLoadError(f"max_kv_size must be above {SINKS}, the tokens that always stay; got {size}")
    return [_bounded(cache, size) for cache in make_prompt_cache(model)]


def _bounded(cache: Any, size: int) -> Any:
    if type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.max_size > size):
        return RotatingKVCache(max_size=size, keep=SINKS)
    if isinstance(cache, RotatingKVCache) or is_recurrent(cache):
        return cache
    raise ModelLoadError(
        f"max_kv_size can't bound this model's cache ({type(cache).__name__}): leave it at 0, or choose another model"
    )
