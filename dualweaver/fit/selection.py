"""All that validation windows decide: weights of targets, a learning rate, the filter's share, going back to zero-shot.

Intervals are calibrated on the same windows, see `dualweaver.forecast.calibration`; which epoch is kept is the business
of `dualweaver.fit.callbacks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.data.windows import WindowDataset
from dualweaver.forecast.pipeline import forecast_windows
from dualweaver.method import FILTER_STRENGTH

__all__ = [
    "channel_error",
    "choose_share",
    "goes_back",
    "lowest",
    "standard_error",
    "target_weights",
]

Key = TypeVar("Key")

# A target with which the frozen model's forecasts correlate no more than this is noise to it, and counts little in
# training, where its large errors would drown what there is to learn about the others. A little, as other channels may
# tell its future.
NOISE_CORRELATION, NOISE_WEIGHT = 0.05, 0.1
# More than `FILTER_STRENGTH` of an edit is applied only where validation is so many standard errors sure of it: what a
# free choice of shares preferred, later rows did not confirm.
SURE = 2.0


def choose_share(
    adapter: DualWeaverAdapter,
    backbone: Backbone,
    validation: WindowDataset,
    context_length: int,
    seed: int,
    shares: Sequence[float] | None = None,
    *,
    freely: float = FILTER_STRENGTH,
) -> dict[float, float]:
    """Leave a trained filter at the share of its edit that validation prefers.

    That is the best of those up to `freely`, unless a larger one is better by `SURE` standard errors.

    Args:
        adapter: with a filter.
        backbone: that it is trained around.
        validation: windows of context and horizon.
        context_length: of the windows.
        seed: of forecasts that are drawn.
        shares: to choose from; the adapter's own where None.
        freely: shares up to here are chosen by their error alone.

    Returns:
        The error of every share, with the adapter's weights of targets.
    """
    assert adapter.weaver.context_filter is not None
    take, weights = adapter.weaver.context_filter.strength.fill_, adapter.weights.cpu()
    errors: dict[float, Tensor] = {}
    for share in adapter.shares if shares is None else shares:
        take(share)
        forecast, truth = forecast_windows(adapter, backbone, validation, context_length, seed=seed)
        squared = (forecast.mean - truth).double().square().mean(dim=1)
        errors[share] = (squared * weights).mean(dim=-1) / weights.mean()
    means = {share: float(error.mean()) for share, error in errors.items()}
    best = min((share for share in errors if share <= freely), key=means.__getitem__)
    # windows that begin within the same horizon share most of their rows
    blocks = validation.starts // (validation.length - context_length)

    def surely_better(share: float) -> bool:
        margin = SURE * standard_error(errors[share] - errors[best], blocks)
        return means[share] < means[best] - margin

    bold = [share for share in errors if share > freely and surely_better(share)]
    take(min([best, *bold], key=means.__getitem__))
    return means


def standard_error(values: Tensor, blocks: Tensor) -> float:
    """Of the mean of `values` `[n]`, of which those with the same number in `blocks` `[n]` may depend on each other.

    The error of a mean over clusters (Liang and Zeger 1986), infinite where there is one only.
    """
    numbers, block = blocks.unique(return_inverse=True)
    count = len(numbers)
    if count < 2:
        return math.inf
    sums = values.new_zeros(count).index_add_(0, block, values - values.mean())
    return math.sqrt(float(sums.square().sum()) * count / (count - 1)) / len(values)


def lowest(errors: Mapping[Key, float]) -> Key:
    """What has the lowest error: a learning rate, or one of the candidates of "auto"; the first one of equals."""
    return min(errors, key=errors.__getitem__)


def goes_back(adapted: npt.NDArray[np.float64], zero_shot: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which targets zero-shot forecasts: where the adapter's error `[target]` is not lower, or not a number."""
    return ~(adapted < zero_shot)


def target_weights(forecast: torch.Tensor, truth: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """How much each target counts, `[target]`; `centre` holds the means of the contexts, `[window, target]`."""
    foreseen, happened = (values.double() - centre[:, None] for values in (forecast, truth))
    sizes = foreseen.square().sum(dim=(0, 1)) * happened.square().sum(dim=(0, 1))
    correlation = (foreseen * happened).sum(dim=(0, 1)) / sizes.sqrt()
    weights = torch.where(correlation > NOISE_CORRELATION, 1.0, NOISE_WEIGHT)
    return weights if (weights == 1).any() else torch.ones_like(weights)


def channel_error(forecast: torch.Tensor, truth: torch.Tensor) -> npt.NDArray[np.float64]:
    """Mean squared error per target, `[target]`, of forecasts `[window, step, target]`."""
    return (forecast - truth).double().square().mean(dim=(0, 1)).numpy()
