"""Parts of a model that a backward pass may compute again instead of keeping what they computed.

A model marks methods as `@recomputable`; a part is such a method of one of its modules, named after both
(`model.layers.3.feed`). Inside of `recomputing(model, parts)` those parts keep their arguments only. The same
operations on the same numbers run again, under the same random numbers, so that losses and gradients keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dualweaver.errors import SettingError

__all__ = ["is_recomputed", "part_names", "recomputable", "recomputing", "watching"]

_CHOSEN = "_recomputed_parts"  # on a module: names of its methods that are computed again

Method = TypeVar("Method", bound=Callable[..., Any])
Watcher = Callable[[nn.Module, str, tuple[Any, ...]], AbstractContextManager[object]]
_watcher: Watcher | None = None


def recomputable(method: Method) -> Method:
    """Mark a method of an `nn.Module` as a part: a function of its arguments and frozen or trained weights.

    A call that is given anything but tensors (a cache, which it would change twice) is always kept.
    """
    name = method.__name__

    @wraps(method)
    def run(self: nn.Module, *args: Any) -> Any:
        if not torch.is_grad_enabled() or not _pure(args):
            return method(self, *args)
        with nullcontext() if _watcher is None else _watcher(self, name, args):
            if not is_recomputed(self, name):
                return method(self, *args)
            # a model that is not in training mode draws nothing
            return checkpoint(method, self, *args, use_reentrant=False, preserve_rng_state=self.training)

    run.recomputable = True  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def is_recomputed(module: nn.Module, method: str) -> bool:
    """Whether a part is computed again here."""
    return method in module.__dict__.get(_CHOSEN, ())


def part_names(model: nn.Module) -> list[str]:
    """Names of all parts of a model, blocks before what they contain."""
    return [
        f"{path}.{method}".lstrip(".")
        for path, module in model.named_modules()
        for method in dir(type(module))
        if getattr(getattr(type(module), method, None), "recomputable", False)
    ]


@contextmanager
def recomputing(model: nn.Module, parts: Collection[str]) -> Iterator[None]:
    """Inside, the backward pass of `model` computes these parts again.

    Raises:
        SettingError: the model has no such part.
    """
    unknown = sorted(set(parts) - set(part_names(model))) if parts else []
    if unknown:
        known = ", ".join(part_names(model)) or "none"
        raise SettingError(f"recompute={unknown[0]!r} is no part of this model; its parts are {known}")
    chosen: dict[str, set[str]] = {}
    for part in parts:
        path, _, method = part.rpartition(".")
        chosen.setdefault(path, set()).add(method)
    modules = [model.get_submodule(path) for path in chosen]
    for module, methods in zip(modules, chosen.values(), strict=True):
        module.__dict__[_CHOSEN] = frozenset(methods)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__[_CHOSEN]


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside, every call of a part that takes gradients runs within `watcher(module, method, arguments)`."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def _pure(args: tuple[Any, ...]) -> bool:
    return all(
        arg is None
        or isinstance(arg, Tensor | int | float)
        or (isinstance(arg, tuple) and all(isinstance(part, Tensor) for part in arg))
        for arg in args
    )
