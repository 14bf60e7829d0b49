"""What the tests of backbones from other packages share."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from toys import waves

from dualweaver import DualWeaver
from dualweaver.backbones import Backbone

__all__ = ["NO_CHRONOS", "check_fit", "gradient_error", "in_units", "mixed_scales"]

NO_CHRONOS = "needs chronos-forecasting, the extra [chronos]"


def mixed_scales(length: int, count: int = 4) -> Tensor:
    """Waves with noise whose scales and levels differ by orders of magnitude, `[count, length]`."""
    time = torch.arange(length, dtype=torch.float64)
    noise = torch.randn(count, length, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shape = torch.sin(time / torch.tensor([[2.0], [3.0], [5.0], [7.0]], dtype=torch.float64)[:count]) + 0.3 * noise
    scale = torch.tensor([[1.0], [1e3], [1e-2], [40.0]], dtype=torch.float64)[:count]
    level = torch.tensor([[0.0], [-2e3], [0.05], [300.0]], dtype=torch.float64)[:count]
    return (shape * scale + level).float()


def gradient_error(
    backbone: Backbone, context: Tensor, horizon: int, still: Tensor | None = None, step: float = 1e-2
) -> float:
    """How far the slope along a random direction is from the gradient's, as a share of the gradient's length.

    Steps where `still` is true do not take part: a model may have a jump where they begin to move.

    In units of each series' deviation. Models that compute in float32 inside allow no more than a hundredth or so.
    """
    scale = context.std(dim=1, keepdim=True).double()
    weights = torch.linspace(-1, 1, horizon, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    exact = backbone.double()
    values = context.double().requires_grad_()
    (exact(values, horizon) / scale * weights).sum().backward()
    assert values.grad is not None
    gradient = values.grad * scale
    worst = 0.0
    for _ in range(4):
        direction = torch.randn(context.shape, generator=generator, dtype=torch.float64)
        if still is not None:
            direction[still] = 0
        direction /= direction.norm()
        moved = step * scale * direction
        with torch.no_grad():
            up, down = (((exact(values + sign * moved, horizon) / scale) * weights).sum() for sign in (1, -1))
        slope = float(up - down) / (2 * step)
        worst = max(worst, abs(slope - float((gradient * direction).sum())) / float(gradient.norm()))
    return worst


def check_fit(backbone: str, context_length: int, folder: Path) -> None:
    """A short fit lowers the validation error below that of the untouched model, and loads again from a folder."""
    frame = waves(260)
    model = DualWeaver(backbone, horizon=8, context_length=context_length, max_epochs=4, verbose=False).fit(frame)
    assert model.scores_ is not None
    assert (model.scores_["mse"] < 0.9 * model.scores_["zero_shot_mse"]).all()
    model.save(folder)
    again = DualWeaver.load(folder)
    assert again.predict(frame).equals(model.predict(frame))


def in_units(forecast: Tensor, context: Tensor) -> Tensor:
    """A forecast, series first, in units of its context's mean and deviation: what float32 can be held to."""
    rows = (-1, *[1] * (forecast.ndim - 1))
    mean, deviation = context.mean(dim=1), context.std(dim=1)
    return (forecast - mean.view(rows)) / deviation.view(rows)
