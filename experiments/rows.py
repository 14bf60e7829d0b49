"""The rows of a data set as a run of the benchmark sees them: with noise, without channels, without the test rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pandas as pd

from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.frames import Block
from dualweaver.data.splits import Splits, split_borders
from dualweaver.data.windows import WindowDataset
from dualweaver.forecast.pipeline import Pipeline

__all__ = ["Rows", "noisy_channels"]


def noisy_channels(channels: int, share: float, seed: int) -> npt.NDArray[np.int64]:
    """Which channels a run replaces by noise or leaves out; those of a smaller share are among those of a larger one.

    Drawn with the seed of the run: how much the others lose depends on which ones go.
    """
    return np.random.default_rng(seed).permutation(channels)[: round(share * channels)]


@dataclass(frozen=True)
class Rows:
    """One data set, changed for one run.

    Attributes:
        data: its name.
        seed: draws the noise, and the channels that go.
        noise, drop: shares of the channels to replace by noise, or to leave out.
        develop: score what the published protocol calls validation rows, and fit on those before.
    """

    data: str
    seed: int = 0
    noise: float = 0.0
    drop: float = 0.0
    develop: bool = False

    @cached_property
    def _cut(self) -> tuple[npt.NDArray[np.float64], Splits]:
        # a gap has no truth to score: filled as `DualWeaver.fit` would
        values = load_dataset(self.data).interpolate(limit_direction="both").to_numpy(float, copy=True)
        replaced = noisy_channels(values.shape[1], self.noise, self.seed)
        white = np.random.default_rng(self.seed + 1).normal(size=(len(values), len(replaced)))
        values[:, replaced] = values[:, replaced].mean(axis=0) + white * values[:, replaced].std(axis=0)
        values = np.delete(values, noisy_channels(values.shape[1], self.drop, self.seed), axis=1)
        splits = split_borders(len(values), describe_dataset(self.data).split)
        if self.develop:
            train, scored = splits.train.stop, splits.validation
            splits = Splits(range(train - len(scored)), range(train - len(scored), train), scored)
            values = values[: scored.stop]
        return values, splits

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """`[time, channel]`, in the data's units."""
        return self._cut[0]

    @property
    def splits(self) -> Splits:
        return self._cut[1]

    def known(self) -> Block:
        """The train and validation rows."""
        known = self.values[: self.splits.validation.stop]
        return Block(None, pd.RangeIndex(len(known)), known, np.ones(known.shape, dtype=bool))

    def to_score(self, pipeline: Pipeline, ahead: int) -> WindowDataset:
        """All windows whose `ahead` steps lie in the test rows, scaled."""
        test = self.splits.test
        scaled = pipeline.scale(self.values[test.start - pipeline.context_length : test.stop])
        length = pipeline.context_length + ahead
        return WindowDataset(scaled, np.arange(len(scaled) - length + 1), length)
