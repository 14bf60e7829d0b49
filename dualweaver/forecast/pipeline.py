"""From arrays to arrays: scaling, the adapter around its backbone, fall-back to zero-shot, calibrated quantiles.

Everything that a fitted forecaster needs once frames are out of the way. Frames are `forecaster`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from dualweaver.adapters import Adapter, ZeroShot
from dualweaver.backbones import Backbone, Forecast
from dualweaver.data.windows import WindowDataset
from dualweaver.forecast.calibration import Calibration

__all__ = ["ArrayForecast", "Pipeline", "context_spread", "forecast_windows", "mix_targets", "replace_targets"]

Array = npt.NDArray[np.float64]
SPREAD_FLOOR = 0.05  # of the training rows' standard deviation
SERIES_AT_ONCE = 2048  # series that go through the backbone in one call when no gradients are kept


@dataclass(frozen=True)
class ArrayForecast:
    """In the data's units: `mean` is `[window, step, target]`, `quantiles` `[window, step, target, level]` or None."""

    mean: Array
    quantiles: Array | None = None


@dataclass
class Pipeline:
    """A fitted forecaster on arrays.

    Attributes:
        backbone: what the adapter wraps; fine-tuned where that was asked for.
        untouched: the backbone as it was loaded, which is what zero-shot means; the same object where frozen.
        fallback: per target, whether the untouched backbone forecasts it, since the adapter did not do better.
        calibration, untouched_calibration: offsets of the quantiles of both; None before they are fitted.
    """

    backbone: Backbone
    adapter: Adapter
    scaler: StandardScaler
    context_length: int
    untouched: Backbone
    fallback: npt.NDArray[np.bool_]
    calibration: Calibration | None = field(default=None)
    untouched_calibration: Calibration | None = field(default=None)
    seed: int = 0

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        return self.adapter.targets.cpu().numpy()

    def scale(self, values: Array) -> Tensor:
        """Standardised float32 rows `[time, channel]`."""
        return torch.as_tensor(self.scaler.transform(values), dtype=torch.float32)

    def forecast(self, contexts: Array, horizon: int, levels: Sequence[float] = ()) -> ArrayForecast:
        """Forecast windows in the data's units: `[window, time, channel]` to `[window, horizon, target]`.

        Contexts may be a view of overlapping windows: they are copied a few at a time.
        """
        at_once = _windows_at_once(self.adapter)
        parts = [
            self._forecast_chunk(contexts[first : first + at_once], horizon, levels)
            for first in range(0, len(contexts), at_once)
        ]
        quantiles = [part.quantiles for part in parts if part.quantiles is not None]
        mean = np.concatenate([part.mean for part in parts])
        return ArrayForecast(mean, np.concatenate(quantiles) if quantiles else None)

    def _forecast_chunk(self, contexts: Array, horizon: int, levels: Sequence[float]) -> ArrayForecast:
        scaled = self.scale(contexts.reshape(-1, contexts.shape[-1])).view(contexts.shape)
        raw = self.forecast_scaled(scaled, horizon)
        own, centre = self.scaler.scale_[self.targets], self.scaler.mean_[self.targets]
        mean = raw.mean.numpy().astype(np.float64)
        quantiles = None
        if levels:
            assert self.calibration is not None
            base = None if raw.quantiles is None else raw.quantiles.numpy().astype(np.float64)
            spread = context_spread(scaled, self.targets)
            quantiles = self.calibration.apply(mean, base, raw.levels, levels, spread)
            quantiles = quantiles * own[:, None] + centre[:, None]
        return ArrayForecast(mean * own + centre, quantiles)

    def forecast_scaled(self, contexts: Tensor, horizon: int) -> Forecast:
        """The same in scaled units, as tensors on the CPU; targets that fall back come from the untouched backbone."""
        rows = np.flatnonzero(self.fallback)
        adapted = untouched = None
        if len(rows) < len(self.fallback):
            chunks = contexts.split(_windows_at_once(self.adapter))
            adapted = _in_chunks(self.adapter, self.backbone, chunks, horizon, self.seed)
        if len(rows):
            plain = self._plain(self.targets[rows].tolist())
            untouched = _in_chunks(plain, self.untouched, contexts.split(_windows_at_once(plain)), horizon, self.seed)
        return replace_targets(adapted, untouched, rows)

    def without_fallback(self) -> Pipeline:
        """The same, with every target forecast by the adapter."""
        return replace(self, fallback=np.zeros_like(self.fallback))

    def zero_shot(self) -> Pipeline:
        """The same with the untouched backbone only."""
        plain = self._plain(self.targets.tolist())
        return Pipeline(
            self.untouched,
            plain,
            self.scaler,
            self.context_length,
            self.untouched,
            np.zeros(len(self.targets), bool),
            self.untouched_calibration,
            self.untouched_calibration,
            self.seed,
        )

    def _plain(self, targets: list[int]) -> ZeroShot:
        plain = ZeroShot(self.adapter.channels, targets)
        plain.series_at_once = self.adapter.series_at_once
        return plain


def forecast_windows(
    adapter: Adapter, backbone: Backbone, windows: WindowDataset, context_length: int, *, seed: int = 0
) -> tuple[Forecast, Tensor]:
    """Forecasts of many windows, and the truth `[window, step, target]`, in scaled units."""
    horizon = windows.length - context_length
    order = torch.arange(len(windows)).split(_windows_at_once(adapter))
    contexts = (windows.__getitems__(chunk.tolist())[:, :context_length] for chunk in order)
    futures = windows.windows[windows.starts, context_length:]
    return _in_chunks(adapter, backbone, contexts, horizon, seed), futures.index_select(-1, adapter.targets.cpu())


def context_spread(contexts: Tensor, targets: npt.NDArray[np.int64]) -> Array:
    """How much each target moves in its context, `[window, target]`: the unit of the quantiles' offsets.

    The standard deviation, with a little added so that a channel that stands still keeps a band.
    """
    own = contexts.index_select(-1, torch.as_tensor(targets)).double()
    return own.std(dim=1, correction=0).numpy() + SPREAD_FLOOR


def replace_targets(adapted: Forecast | None, untouched: Forecast | None, rows: npt.NDArray[np.int64]) -> Forecast:
    """Forecasts of all targets, of which `rows` come from `untouched`, which holds only those.

    Either may be None where the other one gives all targets. Quantiles need both sides to have them.
    """
    if adapted is None or untouched is None:
        whole = adapted or untouched
        assert whole is not None
        return whole
    adapted.mean[..., rows] = untouched.mean
    if adapted.quantiles is not None and untouched.quantiles is not None:
        adapted.quantiles[:, :, rows] = untouched.quantiles
    return adapted


def mix_targets(adapted: Forecast, untouched: Forecast, rows: npt.NDArray[np.int64]) -> Forecast:
    """What `Pipeline.forecast_scaled` gives where `rows` fall back, from forecasts of all targets.

    Overwrites `adapted`.
    """
    if len(rows) == adapted.mean.shape[-1]:
        return untouched
    quantiles = None if untouched.quantiles is None else untouched.quantiles[:, :, rows]
    return replace_targets(adapted, Forecast(untouched.mean[..., rows], quantiles, untouched.levels), rows)


def _windows_at_once(adapter: Adapter) -> int:
    at_once = adapter.series_at_once or SERIES_AT_ONCE
    return max(1, at_once // max(adapter.channels, adapter.series_per_window))


class _Sliced:
    """A backbone that is given a limited number of series at once, however many channels a window has.

    Every slice starts from the same random numbers, so that no forecast depends on how windows were put together.
    """

    def __init__(self, backbone: Backbone, seed: int, at_once: int) -> None:
        self.backbone, self.seed, self.at_once = backbone, seed, at_once

    def distribution(self, context: Tensor, horizon: int, *, generator: torch.Generator) -> Forecast:
        return _join(
            [
                self.backbone.distribution(part, horizon, generator=generator.manual_seed(self.seed))
                for part in context.split(self.at_once)
            ]
        )

    def joint(self, windows: Tensor, horizon: int) -> Forecast:
        return self.backbone.joint(windows, horizon)  # which limits itself


def _in_chunks(adapter: Adapter, backbone: Backbone, chunks: Iterable[Tensor], horizon: int, seed: int) -> Forecast:
    """Forecasts of windows that come in chunks, put together on the CPU: memory does not grow with their number."""
    weights = next(backbone.parameters(), torch.zeros(()))
    adapter = adapter.to(device=weights.device).eval()
    generator = torch.Generator(device=weights.device)
    sliced = cast(Backbone, _Sliced(backbone, seed, adapter.series_at_once or SERIES_AT_ONCE))
    parts = []
    with torch.inference_mode():
        for chunk in chunks:
            part = adapter.distribution(sliced, chunk.to(weights.device), horizon, generator)
            parts.append(
                Forecast(part.mean.cpu(), None if part.quantiles is None else part.quantiles.cpu(), part.levels)
            )
    whole = _join(parts)
    # clones leave inference mode, so that targets can be replaced in place
    return Forecast(whole.mean.clone(), None if whole.quantiles is None else whole.quantiles.clone(), whole.levels)


def _join(parts: Sequence[Forecast]) -> Forecast:
    quantiles = [part.quantiles for part in parts if part.quantiles is not None]
    return Forecast(
        torch.cat([part.mean for part in parts]), torch.cat(quantiles) if quantiles else None, parts[0].levels
    )
