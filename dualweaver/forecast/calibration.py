"""Quantiles that hold: split-conformal offsets from validation windows, per channel and step.

Every base quantile q(tau), or the point forecast where a backbone has no quantiles, is shifted by the tau-quantile of
y - q(tau) over windows that training did not see (one-sided conformalised quantile regression: Romano et al.,
"Conformalized Quantile Regression", 2019, section 4, with one offset a tail).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualweaver.errors import SettingError

__all__ = ["LEVELS", "Calibration", "check_levels", "check_percentages", "edges_of", "interpolate_levels"]

# offsets are kept at these levels; between them they are interpolated
_LOWER = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
LEVELS = (*_LOWER, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99, 0.995)

Array = npt.NDArray[np.float64]


def check_levels(levels: Sequence[float] | float) -> tuple[float, ...]:
    """Ascending, distinct quantile levels in (0, 1), or a SettingError that names the wrong one."""
    return _checked(levels, "quantile", 1)


def check_percentages(levels: Sequence[float] | float) -> tuple[float, ...]:
    """Ascending, distinct interval widths in (0, 100) per cent, or a SettingError that names the wrong one."""
    return _checked(levels, "level", 100)


def _checked(levels: Sequence[float] | float, name: str, top: int) -> tuple[float, ...]:
    try:
        listed = sorted({float(level) for level in np.atleast_1d(np.asarray(levels))})
    except (TypeError, ValueError):
        raise SettingError(f"{name}={levels!r}: expected numbers in (0, {top})") from None
    for level in listed:
        if not 0 < level < top:
            raise SettingError(f"{name} {level:g} is outside of (0, {top})")
    return tuple(listed)


def edges_of(percentage: float) -> tuple[float, float]:
    """Quantile levels of the edges of a central interval: 80 per cent lies between 0.1 and 0.9."""
    return round(0.5 - percentage / 200, 12), round(0.5 + percentage / 200, 12)


def interpolate_levels(values: Array, known: Sequence[float], wanted: Sequence[float]) -> Array:
    """Values along the last axis from levels `known` to levels `wanted`, flat beyond the outermost."""
    position = np.interp(wanted, known, np.arange(len(known)))
    lower = np.floor(position).astype(int)
    upper = np.minimum(lower + 1, len(known) - 1)
    weight = position - lower
    return values[..., lower] * (1 - weight) + values[..., upper] * weight


@dataclass(frozen=True)
class Calibration:
    """Offsets `[step, channel, level]` at `LEVELS`, in units of the spread of the context they belong to.

    Errors grow with how much a channel moves at the time; residuals divided by that are closer to exchangeable, so
    intervals keep their coverage when the data get calmer or wilder (locally weighted conformal prediction: Lei et al.,
    "Distribution-free predictive inference for regression", 2018, section 5.2).
    """

    offsets: npt.NDArray[np.float32]

    @classmethod
    def fit(
        cls,
        truth: Array,
        mean: Array,
        quantiles: Array | None,
        levels: Sequence[float],
        spread: Array | None = None,
    ) -> Calibration:
        """Offsets from forecasts of unseen windows.

        Args:
            truth, mean: `[window, step, channel]`.
            quantiles: `[window, step, channel, level]`, or None for point forecasts.
            levels: of the last axis.
            spread: of the contexts, `[window, channel]`; 1 where None.
        """
        unit = 1.0 if spread is None else spread[:, None, :]
        offsets = np.empty((*truth.shape[1:], len(LEVELS)), dtype=np.float32)
        residuals = None if quantiles is not None else np.sort((truth - mean) / unit, axis=0)
        for position, level in enumerate(LEVELS):
            if quantiles is not None:
                base = interpolate_levels(quantiles, levels, [level])[..., 0]
                residuals = np.sort((truth - base) / unit, axis=0)
            assert residuals is not None
            offsets[..., position] = _conformal_quantile(residuals, level)
        return cls(offsets)

    def apply(
        self,
        mean: Array,
        quantiles: Array | None,
        levels: Sequence[float],
        wanted: Sequence[float],
        spread: Array | None = None,
    ) -> Array:
        """Calibrated quantiles `[window, step, channel, wanted]`, ascending.

        Steps beyond those calibrated use the last one's offsets.
        """
        steps = np.minimum(np.arange(mean.shape[1]), len(self.offsets) - 1)
        shift = interpolate_levels(self.offsets[steps].astype(np.float64), LEVELS, wanted)
        base = mean[..., None] if quantiles is None else interpolate_levels(quantiles, levels, wanted)
        unit = 1.0 if spread is None else spread[:, None, :, None]
        return np.sort(base + shift * unit, axis=-1)


def _conformal_quantile(ordered: Array, level: float) -> Array:
    """The order statistic of n exchangeable residuals that a new one stays below with probability `level`.

    Its rank is (n + 1) * level, rounded outwards, since the rank of a new residual among n is uniform on n + 1 places;
    the outermost where n is too small for the level. `ordered` ascends along its first axis.
    """
    count = len(ordered)
    rank = (count + 1) * level
    if level == 0.5:
        return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    outwards = math.ceil(rank - 1e-9) if level > 0.5 else math.floor(rank + 1e-9)
    return ordered[min(max(outwards, 1), count) - 1]
