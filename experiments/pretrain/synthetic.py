"""Synthetic series to pretrain on: seasons, coloured noise, trends, and what goes wrong in real measurements."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

__all__ = ["draw_series"]

Array = npt.NDArray[np.float64]

# steps of a day, week or year at usual sampling rates: 1 h, 30 min, 15 min, 10 min, 5 min, daily, weekly, monthly
_PERIODS = np.array([24, 24, 24, 48, 96, 96, 144, 144, 288, 7, 7, 30, 52, 12, 365])


def draw_series(count: int, length: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """`[count, length]`: sums of components with weights of their own, then defects; each about of unit size."""
    x = np.zeros((count, length))
    for part, chance in ((_seasons, 0.75), (_coloured, 0.85), (_trends, 0.5), (_white, 0.6), (_filtered, 0.15)):
        chosen = np.flatnonzero(rng.random(count) < chance)
        if len(chosen):
            weight = np.exp(rng.normal(-0.3 if part is not _white else -1.6, 0.8, (len(chosen), 1)))
            x[chosen] += weight * _unit(part(len(chosen), length, rng))
    x = _unit(x)
    for defect, chance in (
        (_multiplied, 0.15),
        (_bent, 0.2),
        (_shifted, 0.12),
        (_spiked, 0.12),
        (_switched, 0.06),
        (_clipped, 0.15),
        (_intermittent, 0.04),
        (_rounded, 0.08),
    ):
        chosen = np.flatnonzero(rng.random(count) < chance)
        if len(chosen):
            x[chosen] = defect(x[chosen], rng)
    return _unit(x).astype(np.float32)


def _unit(x: Array) -> Array:
    """Zero mean and unit deviation; what is constant becomes zero."""
    x = x - x.mean(axis=1, keepdims=True)
    return x / np.maximum(x.std(axis=1, keepdims=True), 1e-6)


def _seasons(count: int, length: int, rng: np.random.Generator) -> Array:
    """A wave of up to 12 harmonics, often with a longer wave on top or a week that changes its size."""
    known = rng.choice(_PERIODS, count).astype(float)
    period = np.where(rng.random(count) < 0.75, known, np.exp(rng.uniform(np.log(4), np.log(400), count)))[:, None]
    time = np.arange(length)[None, :] + rng.uniform(0, 5000, (count, 1))
    x = _wave(time / period, rng)
    day_by_day = rng.normal(size=(count, length + 5))  # the size differs from one cycle to the next
    cycle = np.minimum((time / period - np.floor(time[:, :1] / period)).astype(int), length)
    size = 1 + rng.choice([0.0, 0.1, 0.3, 0.6], (count, 1)) * np.take_along_axis(day_by_day, cycle, axis=1)
    x *= np.where(rng.random((count, 1)) < 0.5, 1, size)
    week = 7 * period
    slow = _wave(time / week, rng)
    kind = rng.random((count, 1))
    x = np.where(kind < 0.25, x + rng.uniform(0.1, 1, (count, 1)) * slow, x)
    weekend = np.mod(time / week, 1) < 2 / 7
    x = np.where((kind > 0.75) & weekend, x * rng.uniform(0, 0.8, (count, 1)) - rng.uniform(0, 1, (count, 1)), x)
    drift = 1 + rng.choice([0.0, 0.0, 0.3, 0.6], (count, 1)) * _coloured(count, length, rng, steep=2.5)
    return x * drift


def _wave(phase: Array, rng: np.random.Generator) -> Array:
    """Harmonics of falling size; few of them are round, many are sharp."""
    count = len(phase)
    harmonics = rng.choice([1, 2, 3, 5, 8, 12], count)
    decay = rng.uniform(0.5, 2.5, count)
    table_size = 256
    grid = np.arange(table_size) / table_size
    order = np.arange(1, 13)
    size = rng.normal(size=(count, 12)) * order ** -decay[:, None] * (order <= harmonics[:, None])
    turn = rng.uniform(0, 2 * np.pi, (count, 12))
    waves = np.exp(2j * np.pi * order[:, None] * grid)
    table = ((size * np.exp(1j * turn)) @ waves).real
    peaked = rng.random(count) < 0.15
    table[peaked] = np.exp(rng.uniform(0.5, 2, (peaked.sum(), 1)) * _unit(table[peaked]))
    table = _unit(table)
    place = np.mod(phase, 1) * table_size
    low = place.astype(int) % table_size
    first, second = np.take_along_axis(table, low, 1), np.take_along_axis(table, (low + 1) % table_size, 1)
    return first + (place - np.floor(place)) * (second - first)


def _coloured(count: int, length: int, rng: np.random.Generator, steep: float | None = None) -> Array:
    """A Gaussian process by its spectrum: a power law that is flat below a corner, and peaks around a period."""
    size = 2048
    frequency = np.arange(1, size // 2 + 1) / size
    power = rng.uniform(0.3, 3.0, (count, 1)) if steep is None else np.full((count, 1), steep)
    corner = np.exp(rng.uniform(np.log(1 / 4000), np.log(1 / 10), (count, 1)))
    density = (frequency + corner) ** -power
    if steep is None:
        centre = 1 / np.exp(rng.uniform(np.log(4), np.log(300), (count, 1)))
        peak = np.exp(-(((frequency - centre) / (centre * rng.uniform(0.01, 0.3, (count, 1)))) ** 2))
        share = density.sum(1, keepdims=True) / np.maximum(peak.sum(1, keepdims=True), 1e-9)
        density = density + peak * share * (rng.random((count, 1)) < 0.3) * rng.uniform(0, 3, (count, 1))
    noise = rng.normal(size=(count, size // 2)) + 1j * rng.normal(size=(count, size // 2))
    spectrum = np.concatenate([np.zeros((count, 1)), noise * np.sqrt(density)], axis=1)
    return _unit(np.fft.irfft(spectrum, n=size, axis=1)[:, :length])


def _trends(count: int, length: int, rng: np.random.Generator) -> Array:
    """Random walks, straight lines, lines with a kink, saturation."""
    time = np.linspace(0, 1, length)[None, :]
    kink = rng.uniform(0.1, 0.95, (count, 1))
    line = rng.normal(size=(count, 1)) * time + rng.normal(size=(count, 1)) * np.maximum(time - kink, 0) * 2
    curve = np.tanh((time - kink) * rng.uniform(1, 10, (count, 1)))
    heavy = rng.standard_t(3, (count, length)) * (rng.random((count, 1)) < 0.3)
    walk = _unit(np.cumsum(rng.normal(size=(count, length)) + heavy, axis=1))
    kind = rng.random((count, 1))
    return np.where(kind < 0.5, walk, np.where(kind < 0.85, line, curve))


def _white(count: int, length: int, rng: np.random.Generator) -> Array:
    """Noise; with heavy tails, or louder at times, now and then."""
    noise = rng.normal(size=(count, length))
    tails = rng.standard_t(3, (count, length))
    loud = np.exp(0.7 * _coloured(count, length, rng, steep=2.0))
    kind = rng.random((count, 1))
    return np.where(kind < 0.5, noise, np.where(kind < 0.75, tails, noise * loud))


def _filtered(count: int, length: int, rng: np.random.Generator) -> Array:
    """Stable ARMA processes, some with a season of their own."""
    warm = 300
    noise = rng.normal(size=(count, length + warm))
    out = np.empty((count, length))
    for row in range(count):
        radius, angle = rng.uniform(0.3, 0.995), rng.uniform(0, np.pi)
        poles = [1, -2 * radius * np.cos(angle), radius**2] if rng.random() < 0.5 else [1, -radius]
        if rng.random() < 0.3:
            lag = int(rng.choice([7, 12, 24, 48, 96]))
            poles = np.convolve(poles, [1.0, *[0.0] * (lag - 1), -rng.uniform(0.5, 0.95)]).tolist()
        out[row] = lfilter([1, rng.uniform(-0.9, 0.9)], poles, noise[row])[warm:]
    return out


def _multiplied(x: Array, rng: np.random.Generator) -> Array:
    """The noise and the season grow with the level."""
    level = np.exp(rng.uniform(0.2, 0.8, (len(x), 1)) * _coloured(len(x), x.shape[1], rng, steep=2.5))
    return x * level


def _bent(x: Array, rng: np.random.Generator) -> Array:
    """Skewed, as prices and loads are."""
    power = rng.uniform(0.3, 1.2, (len(x), 1))
    return np.exp(power * np.clip(x, -4, 4)) * rng.choice([-1, 1], (len(x), 1), p=[0.2, 0.8])


def _shifted(x: Array, rng: np.random.Generator) -> Array:
    """One or two jumps of the level."""
    time = np.arange(x.shape[1])[None, :]
    for _ in range(2):
        x = x + rng.normal(0, 1.2, (len(x), 1)) * (time >= rng.uniform(0, 1.3, (len(x), 1)) * x.shape[1])
    return x


def _spiked(x: Array, rng: np.random.Generator) -> Array:
    """Rare values far away."""
    hit = rng.random(x.shape) < rng.uniform(0.001, 0.02, (len(x), 1))
    return x + hit * rng.normal(0, 3, x.shape) * rng.choice([1.0, 2.0], (len(x), 1))


def _switched(x: Array, rng: np.random.Generator) -> Array:
    """Two ways to behave that take turns."""
    turn = _coloured(len(x), x.shape[1], rng, steep=2.0) > rng.normal(0, 0.5, (len(x), 1))
    return np.where(turn, x, x * rng.uniform(0, 0.5, (len(x), 1)) + rng.normal(0, 1, (len(x), 1)))


def _clipped(x: Array, rng: np.random.Generator) -> Array:
    """Nothing below a floor, as for the sun at night or rain; some also have a ceiling."""
    low = np.quantile(x, rng.uniform(0.1, 0.7), axis=1, keepdims=True)
    high = np.where(rng.random((len(x), 1)) < 0.2, np.quantile(x, 0.95, axis=1, keepdims=True), np.inf)
    return np.clip(x, low, high)


def _intermittent(x: Array, rng: np.random.Generator) -> Array:
    """Counts, mostly zero."""
    return rng.poisson(np.exp(np.clip(x + rng.uniform(-2, 0.5, (len(x), 1)), -5, 4))).astype(float)


def _rounded(x: Array, rng: np.random.Generator) -> Array:
    """A coarse scale, or values that stay for some steps."""
    step = rng.uniform(0.05, 0.6, (len(x), 1))
    hold = int(rng.integers(2, 6))
    held = x[:, np.arange(x.shape[1]) // hold * hold]
    return np.where(rng.random((len(x), 1)) < 0.6, np.round(x / step) * step, held)
