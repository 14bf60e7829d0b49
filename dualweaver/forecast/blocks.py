"""From the blocks of a frame to the forecast of what follows each, with checks that name frame, entity and column."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from dualweaver.data.frames import Block
from dualweaver.errors import DataError
from dualweaver.forecast.pipeline import ArrayForecast, Pipeline
from dualweaver.notices import notify

__all__ = ["check_magnitudes", "forecast_blocks", "tail_of"]

LARGEST = 1e100  # variances of larger numbers leave the range of a float


def check_magnitudes(blocks: Sequence[Block], columns: Sequence[Hashable]) -> None:
    """Refuse numbers whose squares leave the range of a float."""
    for block in blocks:
        largest = np.maximum(block.values.max(axis=0), -block.values.min(axis=0))
        for name, size in zip(columns, largest, strict=True):
            if size > LARGEST:
                raise DataError(
                    f"column {name!r} holds numbers as large as {size:.3g}: rescale it to below {LARGEST:g}"
                )


def tail_of(block: Block, rows: int) -> Block:
    """The last rows as a copy of their own, so that the rest of the frame can be freed."""
    rows = max(rows, 9)  # future time stamps are told from several
    index = block.index[-rows:].copy(deep=True)
    return Block(block.entity, index, block.values[-rows:].copy(), block.observed[-rows:].copy())


def forecast_blocks(
    pipeline: Pipeline,
    blocks: Sequence[Block],
    targets: Sequence[Hashable],
    horizon: int,
    levels: Sequence[float] = (),
    *,
    fitted_horizon: int,
) -> list[ArrayForecast]:
    """One forecast `[1, horizon, target]` a block, after all of them were checked.

    Args:
        targets: names of what is forecast.
        levels: of the quantiles to add.
        fitted_horizon: the longest that the user has been told of already.

    Raises:
        DataError: an entity has fewer rows than the backbone takes, or a forecast is not finite.
    """
    context, needed, native = pipeline.context_length, pipeline.backbone.min_context, pipeline.backbone.native_horizon
    for block in blocks:
        if len(block.index) < needed:
            raise DataError(
                f"{block.name} has {len(block.index)} rows: the backbone needs at least {needed} to forecast "
                "what follows"
            )
    shortest = min(blocks, key=lambda block: len(block.index))
    if len(shortest.index) < context:
        notify(f"{shortest.name} has {len(shortest.index)} rows: its forecast sees these only, instead of {context}")
    if horizon > max(native, fitted_horizon):
        notify(
            f"horizon {horizon} is beyond the backbone's native horizon of {native} steps and the {fitted_horizon} "
            "it was fitted for: forecasts are rolled forward, fed back as context"
        )
    forecasts = []
    for block in blocks:
        forecast = pipeline.forecast(block.values[None, -context:], horizon, levels)
        broken = np.unique(np.argwhere(~np.isfinite(forecast.mean))[:, 2])
        if len(broken):
            names = ", ".join(repr(targets[position]) for position in broken[:8])
            raise DataError(
                f"the forecast of {names} in {block.name} is not finite: its values are too far from those that "
                "the model was fitted on, or the backbone is broken"
            )
        forecasts.append(forecast)
    return forecasts
