"""Chronos-Bolt and Chronos-2 (Amazon), in the implementation of their makers' package `chronos-forecasting`.

Sources: Ansari et al., "Chronos", arXiv 2403.07815, and "Chronos-2", arXiv 2510.15821; the public checkpoints
`amazon/chronos-bolt-*` and `amazon/chronos-2`. The package's pipelines forecast without gradients, so the rollout is
written here once more, with the same numbers. It is imported when a model is loaded, and not before.
"""

from __future__ import annotations

import importlib
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dualweaver.backbones.base import Forecast
from dualweaver.backbones.pretrained import PretrainedBackbone
from dualweaver.backbones.quantiles import QuantileBackbone, empirical_quantiles
from dualweaver.errors import CheckpointError, SettingError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Chronos2Backbone", "ChronosBoltBackbone"]

_CONTEXT = 2048
_TOGETHER = 64  # series; Chronos-2 lets all series of a batch look at each other, then masks that, at quadratic cost
_PATHS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # along which Chronos-2 goes on beyond its first block


class _ChronosBackbone(PretrainedBackbone, QuantileBackbone):
    """What the two have in common.

    Beyond the first block each of nine quantiles is appended to a copy of the context, and the quantiles of all that is
    forecast from there are the next block, as in the makers' pipelines. Every further block costs nine first ones.
    """

    licence = "Apache-2.0"
    extra = "chronos"
    large_products = True
    flat_is_constant = True
    source: ClassVar[tuple[str, str]]  # module and class of the makers' package

    max_context: int

    def __init__(
        self,
        model: nn.Module,
        *,
        native_horizon: int,
        context_length: int | None = None,
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        settings: Any = model.chronos_config
        super().__init__(
            context_length=min(_CONTEXT, settings.context_length) if context_length is None else context_length,
            native_horizon=native_horizon,
            max_context=settings.context_length,
            quantile_levels=settings.quantiles,
            checkpoint=checkpoint,
            revision=revision,
        )
        self.model = model
        self.freeze()

    @classmethod
    def model_class(cls) -> type[PreTrainedModel]:
        module, name = cls.source
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SettingError(
                f"backbone={cls.name!r} needs the package chronos-forecasting, 2.3 or newer: "
                'pip install "dualweaver-forecast[chronos]"'
            ) from error

    @property
    @abstractmethod
    def path_levels(self) -> list[int]:
        """Indices of the levels along which a forecast goes on."""

    @abstractmethod
    def merge(self, samples: Tensor) -> Tensor:
        """Quantiles of what was forecast along all paths: `[series, path, time, level]` to `[series, time, level]`."""

    def steps_of_block(self, missing: int) -> int | None:
        """Steps to ask of the next block, None for a whole one."""
        del missing
        return None

    def _roll(self, context: Tensor, horizon: int) -> Tensor:
        self.check_context(context.shape[1])
        context = context[:, -self.max_context :]
        block = self.one_block(context, self.steps_of_block(horizon))
        blocks, missing = [block], horizon - block.shape[1]
        levels = self.path_levels
        paths = context[:, None].expand(-1, len(levels), -1)
        while missing > 0:
            paths = torch.cat([paths, block[..., levels].transpose(1, 2)], dim=2)[..., -self.max_context :]
            ahead = self.one_block(paths.flatten(0, 1), self.steps_of_block(missing))
            block = self.merge(ahead.unflatten(0, (len(context), len(levels))))
            blocks.append(block)
            missing -= block.shape[1]
        return torch.cat(blocks, dim=1)[:, :horizon]


class ChronosBoltBackbone(_ChronosBackbone):
    """Chronos-Bolt: nine quantiles of 64 steps.

    Args:
        model: the wrapped model.
        context_length: past steps to feed, 2048 where None, or all that the model takes, if that is fewer.
        checkpoint, revision: where the weights came from.
    """

    name = "chronos-bolt"
    default_checkpoint = "amazon/chronos-bolt-small"
    summary = "Chronos-Bolt, 9M to 205M: encoder-decoder transformer, context up to 2048, horizon 64, nine quantiles"
    source = ("chronos.chronos_bolt", "ChronosBoltModelForForecasting")

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, native_horizon=model.chronos_config.prediction_length, **options)

    @property
    def path_levels(self) -> list[int]:
        return list(range(len(self.quantile_levels)))

    def native(self, context: Tensor) -> Tensor:
        """`[series, time]` to `[series, 64, 9]`."""
        return self.model(context=context).quantile_preds.transpose(1, 2).to(context.dtype)

    def merge(self, samples: Tensor) -> Tensor:
        return empirical_quantiles(samples.transpose(2, 3).flatten(1, 2), self.quantile_levels)


class Chronos2Backbone(_ChronosBackbone):
    """Chronos-2, each series on its own unless in `joint`: 21 quantiles of up to 1024 steps, in patches of 16.

    A forecast has as many patches as its horizon needs, and they see each other, so that its first steps depend on the
    horizon a little, as in the makers' pipeline.

    Args:
        model: the wrapped model.
        context_length: past steps to feed, 2048 where None, or all that the model takes, if that is fewer.
        checkpoint, revision: where the weights came from.
    """

    name = "chronos-2"
    default_checkpoint = "amazon/chronos-2"
    summary = "Chronos-2, 120M: encoder transformer, context up to 8192, horizon 1024, 21 quantiles, adapter='joint'"
    source = ("chronos.chronos2", "Chronos2Model")
    multivariate = True

    def __init__(self, model: Any, **options: Any) -> None:
        settings = model.chronos_config
        super().__init__(model, native_horizon=settings.max_output_patches * settings.output_patch_size, **options)
        self.patch: int = settings.output_patch_size
        self._paths = [level for level in _PATHS if level in self.quantile_levels]
        if not self._paths:
            raise CheckpointError(f"Chronos-2 goes on along the quantiles {_PATHS}, of which this model has none")

    @property
    def path_levels(self) -> list[int]:
        return [self.quantile_levels.index(level) for level in self._paths]

    def native(self, context: Tensor, steps: int | None = None) -> Tensor:
        """`[series, time]` to `[series, steps, 21]`, whole patches; 1024 steps where None."""
        patches = (steps or self.native_horizon) // self.patch
        parts = [
            self.model(context=part, num_output_patches=patches).quantile_preds for part in context.split(_TOGETHER)
        ]
        return torch.cat(parts).transpose(1, 2).to(context.dtype)

    def steps_of_block(self, missing: int) -> int:
        return min(math.ceil(missing / self.patch) * self.patch, self.native_horizon)

    @torch.no_grad()
    def joint(self, windows: Tensor, horizon: int | None = None) -> Forecast:
        """All channels of a window as one group, which the model was made for, see `Backbone.joint`."""
        self.check_context(windows.shape[1])
        groups = windows.split(max(1, _TOGETHER // windows.shape[2]))
        quantiles = torch.cat([self._joint_quantiles(part, horizon or self.native_horizon) for part in groups])
        return Forecast(self._point(quantiles), quantiles.sort(dim=-1).values, self.quantile_levels)

    def _joint_quantiles(self, windows: Tensor, horizon: int) -> Tensor:
        """As `_roll`, but on a path the channels of a window go on together: `[batch * channel, horizon, level]`."""
        paths = windows.transpose(1, 2)[:, None, :, -self.max_context :]
        block = self._grouped(paths, self.steps_of_block(horizon))[:, 0]
        blocks, missing = [block], horizon - block.shape[2]
        levels = self.path_levels
        paths = paths.expand(-1, len(levels), -1, -1)
        while missing > 0:
            ahead = block[..., levels].permute(0, 3, 1, 2)
            paths = torch.cat([paths, ahead], dim=3)[..., -self.max_context :]
            ahead = self._grouped(paths, self.steps_of_block(missing)).transpose(1, 2)
            block = self.merge(ahead.flatten(0, 1)).unflatten(0, (len(windows), -1))
            blocks.append(block)
            missing -= block.shape[2]
        return torch.cat(blocks, dim=2).flatten(0, 1)[:, :horizon]

    def _grouped(self, paths: Tensor, steps: int) -> Tensor:
        """`[batch, path, channel, time]` to `[batch, path, channel, steps, level]`; those of a path see each other."""
        batch, count, channels, _ = paths.shape
        groups = torch.arange(batch * count, device=paths.device).repeat_interleave(channels)
        output = self.model(context=paths.flatten(0, 2), group_ids=groups, num_output_patches=steps // self.patch)
        return output.quantile_preds.transpose(1, 2).unflatten(0, (batch, count, channels)).to(paths.dtype)

    def merge(self, samples: Tensor) -> Tensor:
        from chronos.utils import weighted_quantile

        shares = torch.outer(_share_of(self._paths), _share_of(self.quantile_levels)).flatten()
        together = samples.transpose(1, 2).flatten(2)
        return weighted_quantile(list(self.quantile_levels), shares, together)


def _share_of(levels: Any) -> Tensor:
    """Probability that each quantile stands for, `[level]`: half of the way to either neighbour, all together one."""
    ends = torch.tensor([0.0, *levels, 1.0])
    share = (ends[2:] - ends[:-2]) / 2
    return share / share.sum()
