"""What is left of the method when a part of it is taken away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dualweaver.adapters import Adapter, DualWeaverAdapter
from dualweaver.method import Weaver
from dualweaver.settings import FitSettings

__all__ = ["ABLATIONS", "FLIP", "ablated"]


def no_fusion(adapter: DualWeaverAdapter) -> None:
    """F = 0; a, b and the filter are trained."""
    for weight in adapter.weaver.fusion.parameters():  # its last layer starts at zero
        weight.requires_grad_(False)


def equal_scales(adapter: DualWeaverAdapter) -> None:
    """a = b = 1."""
    adapter.weaver.a.requires_grad_(False)
    adapter.weaver.b.requires_grad_(False)


class _SeparateMasks(Weaver):
    """F is evaluated for each surrogate under a dropout mask of its own, as in the published code."""

    def _around(self, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return super()._around(x, own)[0], super()._around(x, own)[1]


def separate_dropout(adapter: DualWeaverAdapter) -> None:
    adapter.weaver.__class__ = _SeparateMasks


def whole(adapter: DualWeaverAdapter) -> None:
    """Forecasts apply all of the edit that the filter has found."""
    assert adapter.weaver.context_filter is not None
    adapter.shares = ()
    adapter.weaver.context_filter.strength.fill_(1)


ABLATIONS: dict[str, Callable[[DualWeaverAdapter], None]] = {
    "no-fusion": no_fusion,
    "equal-scales": equal_scales,
    "separate-dropout": separate_dropout,
    "whole": whole,
}


FLIP = "flip"


@dataclass(repr=False, eq=False, kw_only=True)
class _Ablated(FitSettings):
    ablation: str = ""

    def make_adapter(self, channels: int, targets: Sequence[int]) -> Adapter:
        adapter = super().make_adapter(channels, targets)
        assert isinstance(adapter, DualWeaverAdapter)
        ABLATIONS[self.ablation](adapter)
        return adapter


def ablated(settings: FitSettings, ablation: str | None) -> FitSettings:
    """The same settings, under which an adapter is made without the part that `ablation` names; with it if None.

    "flip" trains nothing: the forecast of the untrained method, (f(x) - f(-x)) / 2.
    """
    if ablation is None:
        return settings
    if ablation == FLIP:
        return dataclasses.replace(settings, max_epochs=1, learning_rate=1e-30)
    return _Ablated(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}, ablation=ablation)
