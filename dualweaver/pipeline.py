"""From arrays to arrays: scaling, the adapter around its backbone, fall-back to zero-shot, calibrated quantiles.

Everything that a fitted forecaster needs once frames are out of the way. Frames are `forecaster`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from dualweaver.adapters import Adapter, ZeroShot
from dualweaver.backbones import Backbone, Forecast
from dualweaver.calibration import Calibration
from dualweaver.data.windows import WindowDataset

__all__ = ["ArrayForecast", "Pipeline", "forecast_windows"]

Array = npt.NDArray[np.float64]
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
        fallback: per target, whether the untouched backbone forecasts it, since the adapter did not do better.
        calibration: offsets of the quantiles, None before `calibrate`.
    """

    backbone: Backbone
    adapter: Adapter
    scaler: StandardScaler
    context_length: int
    fallback: npt.NDArray[np.bool_]
    calibration: Calibration | None = field(default=None)
    seed: int = 0

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        return self.adapter.targets.cpu().numpy()

    def scale(self, values: Array) -> Tensor:
        """Standardised float32 rows `[time, channel]`."""
        return torch.as_tensor(self.scaler.transform(values), dtype=torch.float32)

    def forecast(self, contexts: Array, horizon: int, levels: Sequence[float] = ()) -> ArrayForecast:
        """Forecast windows in the data's units: `[window, time, channel]` to `[window, horizon, target]`."""
        windows, time, channels = contexts.shape
        scaled = self.scale(contexts.reshape(-1, channels)).view(windows, time, channels)
        raw = self.forecast_scaled(scaled, horizon)
        own, centre = self.scaler.scale_[self.targets], self.scaler.mean_[self.targets]
        mean = raw.mean.numpy().astype(np.float64)
        quantiles = None
        if levels:
            assert self.calibration is not None
            base = None if raw.quantiles is None else raw.quantiles.numpy().astype(np.float64)
            quantiles = self.calibration.apply(mean, base, raw.levels, levels)
            quantiles = quantiles * own[:, None] + centre[:, None]
        return ArrayForecast(mean * own + centre, quantiles)

    def forecast_scaled(self, contexts: Tensor, horizon: int) -> Forecast:
        """The same in scaled units, as tensors on the CPU; channels that fall back come from the untouched backbone."""
        forecast = _in_chunks(
            self.adapter, self.backbone, contexts.split(_windows_at_once(self.adapter)), horizon, self.seed
        )
        rows = np.flatnonzero(self.fallback)
        if len(rows) == 0:
            return forecast
        plain = ZeroShot(self.adapter.channels, self.targets[rows].tolist())
        untouched = _in_chunks(plain, self.backbone, contexts.split(_windows_at_once(plain)), horizon, self.seed)
        forecast.mean[..., rows] = untouched.mean
        if forecast.quantiles is not None and untouched.quantiles is not None:
            forecast.quantiles[:, :, rows] = untouched.quantiles
        return forecast

    def zero_shot(self) -> Pipeline:
        """The same with the untouched backbone only."""
        plain = ZeroShot(self.adapter.channels, self.targets.tolist())
        return Pipeline(
            self.backbone, plain, self.scaler, self.context_length, np.zeros(len(self.targets), bool), seed=self.seed
        )


def forecast_windows(
    adapter: Adapter, backbone: Backbone, windows: WindowDataset, context_length: int, *, seed: int = 0
) -> tuple[Forecast, Tensor]:
    """Forecasts of many windows, and the truth `[window, step, target]`, in scaled units."""
    horizon = windows.length - context_length
    order = torch.arange(len(windows)).split(_windows_at_once(adapter))
    contexts = (windows.__getitems__(chunk.tolist())[:, :context_length] for chunk in order)
    futures = windows.windows[windows.starts, context_length:]
    return _in_chunks(adapter, backbone, contexts, horizon, seed), futures.index_select(-1, adapter.targets.cpu())


def _windows_at_once(adapter: Adapter) -> int:
    return max(1, SERIES_AT_ONCE // (2 * adapter.channels))


def _in_chunks(adapter: Adapter, backbone: Backbone, chunks: Iterable[Tensor], horizon: int, seed: int) -> Forecast:
    """Forecasts of windows that come in chunks, put together on the CPU: memory does not grow with their number."""
    weights = next(backbone.parameters(), torch.zeros(()))
    adapter = adapter.to(device=weights.device).eval()
    generator = torch.Generator(device=weights.device).manual_seed(seed)
    parts = []
    with torch.inference_mode():
        for chunk in chunks:
            part = adapter.distribution(backbone, chunk.to(weights.device), horizon, generator)
            parts.append(
                Forecast(part.mean.cpu(), None if part.quantiles is None else part.quantiles.cpu(), part.levels)
            )
    quantiles = [part.quantiles for part in parts if part.quantiles is not None]
    # clones leave inference mode, so that channels can be replaced in place
    mean = torch.cat([part.mean for part in parts]).clone()
    return Forecast(mean, torch.cat(quantiles).clone() if quantiles else None, parts[0].levels)
