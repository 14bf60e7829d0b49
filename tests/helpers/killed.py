"""Fits that end too early, and everything that a fit leaves, to compare."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from toys import Toy, waves, weaver

from dualweaver import DualWeaver


class KilledError(Exception):
    """Stands for a kill where the process must live on."""


class Count:
    """Forwards so far, of a backbone and of the copies that are trained."""

    def __init__(self, at: float, event: Callable[[], None]) -> None:
        self.forwards, self.at, self.event = 0, at, event

    def __deepcopy__(self, memo: dict[int, Any]) -> Count:
        return self


def raise_killed() -> None:
    raise KilledError


class Breaks(Toy):
    """Counts its forwards, and lets something happen at one of them."""

    def __init__(self, at: float = math.inf, event: Callable[[], None] = raise_killed) -> None:
        super().__init__()
        self.count = Count(at, event)

    @property
    def forwards(self) -> int:
        return self.count.forwards

    def forward(self, x: Tensor) -> Tensor:
        self.count.forwards += 1
        if self.count.forwards == self.count.at:
            self.count.event()
        return super().forward(x)


def model(backbone: Toy | None = None, **settings: Any) -> DualWeaver:
    return weaver(backbone or Toy(), **{"max_epochs": 5, "window_stride": 3, **settings})


def bits(fitted: DualWeaver) -> dict[str, Any]:
    parts = {"adapter": fitted.pipeline_.adapter, "backbone": fitted.pipeline_.backbone}
    weights = {f"{part}.{name}": t.tolist() for part, m in parts.items() for name, t in m.state_dict().items()}
    return weights | {"history": fitted.history_.to_json(), "forecast": fitted.predict(level=[80]).to_csv()}


def killed(folder: Path, at: int, **settings: Any) -> None:
    with pytest.raises(KilledError):
        model(Breaks(at), **settings).fit(waves(), resume=folder)
