"""How much of what a filter has learned forecasts apply, by the errors of validation windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.data.windows import WindowDataset
from dualweaver.pipeline import forecast_windows
from dualweaver.weaver import FILTER_STRENGTH

__all__ = ["choose_share", "standard_error"]

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
