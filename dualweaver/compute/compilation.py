"""The frozen model through `torch.compile`, where that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dualweaver.notices import notify

__all__ = ["compiled"]


@contextmanager
def compiled(backbone: nn.Module) -> Iterator[nn.Module]:
    """Forecasts and losses of a frozen backbone run compiled inside this context, and as before after it.

    Where compiling fails (no C++ compiler, an operation that is not supported), a notice says so and all goes on
    uncompiled. Numbers differ by rounding.

    What it buys on a processor is little, since products take most of the time: on one thread of a two-core machine, a
    training step (4 windows of 7 channels and 672 steps) took 0.95 of its processor time with Timer's real size, 0.83
    with a hidden size of 128, and 0.99 with TinyTimeMixer; compiling took 5 to 16 s of processor time.
    """
    label, names = str(getattr(backbone, "name", type(backbone).__name__)), ("forward", "loss")
    for name in names:
        setattr(backbone, name, _Compiled(getattr(backbone, name), label))
    try:
        yield backbone
    finally:
        for name in names:
            delattr(backbone, name)  # the class's own is visible again


class _Compiled:
    """A function that is compiled when it is first called, or given up to its uncompiled self."""

    def __init__(self, plain: Callable[..., Any], label: str) -> None:
        self.plain, self.label = plain, label
        self.function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is not self.plain:
            try:
                self.function = self.function or torch.compile(self.plain)
                return self.function(*args, **kwargs)
            except Exception as error:  # whatever a compiler raises; an error of the model itself comes again below
                self.function = self.plain
                result = self.plain(*args, **kwargs)
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                notify(
                    f"compile=True: the backbone {self.label!r} cannot be compiled here ({reason}): it runs as it is"
                )
                return result
        return self.plain(*args, **kwargs)
