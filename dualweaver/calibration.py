"""Quantiles that hold: split-conformal offsets from validation windows, per channel and step.

Every base quantile q(tau), or the point forecast where a backbone has no quantiles, is shifted by the tau-quantile of
y - q(tau) over windows that training did not see (one-sided conformalised quantile regression: Romano et al.,
"Conformalized Quantile Regression", 2019, section 4, with one offset a tail).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualweaver.errors import SettingError

__all__ = ["LEVELS", "Calibration", "check_levels", "interpolate_levels"]

# offsets are kept at these levels; between them they are interpolated
LEVELS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)

Array = npt.NDArray[np.float64]


def check_levels(levels: Sequence[float]) -> tuple[float, ...]:
    """Ascending, distinct levels in (0, 1), or a SettingError that names the wrong one."""
    for level in levels:
        if not 0 < level < 1:
            raise SettingError(f"quantile {level:g} is outside of (0, 1)")
    return tuple(sorted(set(levels)))


def interpolate_levels(values: Array, known: Sequence[float], wanted: Sequence[float]) -> Array:
    """Values along the last axis from levels `known` to levels `wanted`, flat beyond the outermost."""
    position = np.interp(wanted, known, np.arange(len(known)))
    lower = np.floor(position).astype(int)
    upper = np.minimum(lower + 1, len(known) - 1)
    weight = position - lower
    return values[..., lower] * (1 - weight) + values[..., upper] * weight


@dataclass(frozen=True)
class Calibration:
    """Offsets `[step, channel, level]` at `LEVELS`, in scaled units."""

    offsets: npt.NDArray[np.float32]

    @classmethod
    def fit(cls, truth: Array, mean: Array, quantiles: Array | None, levels: Sequence[float]) -> Calibration:
        """Offsets from forecasts of unseen windows.

        Args:
            truth, mean: `[window, step, channel]`.
            quantiles: `[window, step, channel, level]`, or None for point forecasts.
            levels: of the last axis.
        """
        offsets = np.empty((*truth.shape[1:], len(LEVELS)), dtype=np.float32)
        for position, level in enumerate(LEVELS):
            base = mean if quantiles is None else interpolate_levels(quantiles, levels, [level])[..., 0]
            # outward rounding of the rank is the finite-sample correction
            method = "higher" if level > 0.5 else "lower" if level < 0.5 else "linear"
            offsets[..., position] = np.quantile(truth - base, level, axis=0, method=method)  # type: ignore[call-overload]
        return cls(offsets)

    def apply(self, mean: Array, quantiles: Array | None, levels: Sequence[float], wanted: Sequence[float]) -> Array:
        """Calibrated quantiles `[window, step, channel, wanted]`, ascending.

        Steps beyond those calibrated use the last one's offsets.
        """
        steps = np.minimum(np.arange(mean.shape[1]), len(self.offsets) - 1)
        shift = interpolate_levels(self.offsets[steps].astype(np.float64), LEVELS, wanted)
        base = mean[..., None] if quantiles is None else interpolate_levels(quantiles, levels, wanted)
        return np.sort(base + shift, axis=-1)
