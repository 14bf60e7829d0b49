"""The contract between the method and a frozen univariate forecaster.

A backbone maps `[series, time]` to `[series, horizon]`, differentiably with respect to its input. The method needs
nothing else from it, so any `torch.nn.Module` with that forward can stand in (`ModuleBackbone`).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dualweaver.backbones.guard import around_flat, with_finite_gradient
from dualweaver.compute.recompute import recomputable
from dualweaver.errors import SettingError
from dualweaver.notices import notify

__all__ = ["Backbone", "Forecast", "ModuleBackbone"]


@dataclass(frozen=True)
class Forecast:
    """A forecast of independent series.

    Attributes:
        mean: point forecast, `[series, horizon]`; the median for backbones that forecast quantiles or samples.
        quantiles: `[series, horizon, level]`, or None for point backbones.
        levels: the quantile levels of the last axis, ascending, in (0, 1).
    """

    mean: Tensor
    quantiles: Tensor | None = None
    levels: tuple[float, ...] = ()


class Backbone(nn.Module, ABC):
    """A frozen, differentiable, univariate forecaster.

    Forecasts come in the dtype of the context, whatever that of the weights.

    Subclasses implement `native` (one block of `native_horizon` steps) and `from_checkpoint`; those that generate in
    another way override `forward` and `distribution`, those trained on another loss than the squared error of the
    forecast override `loss` and `label_start`.

    Gradients to the context that are not finite count as zero; `zeroed_gradients` counts them, and the first ones are
    told in a notice. Those that override `forward` or `loss` pass their context through `guarded`.

    Attributes:
        name: the registered name.
        licence: of code and weights; of the two where they differ.
        extra: the extra of this package that brings what the model needs (`pip install "dualweaver-forecast[extra]"`).
        context_length: past steps that the model is fed with by default.
        min_context: the fewest past steps it accepts.
        max_context: the most it accepts (longer contexts are cut from the left), or None.
        native_horizon: steps of one block; longer horizons are rolled forward.
        quantile_levels: levels of the last axis of `native`, symmetric around one half; () for point backbones.
        large_products: whether matrix products take most of the time, so that bfloat16 pays.
        flat_is_constant: a context that does not move never reaches the model: its forecast is its last value, without
            a gradient. For models that divide by a deviation of zero. Off where the model is safe by itself, since
            what it makes of such a context is then a forecast like any other.
        multivariate: whether the model can also take all channels of a window together, by `joint`.
        loss_kind: whether `loss` is a squared or an absolute error; decides the bound of the collapse regulariser.
        checkpoint, revision: where the weights came from.
        zeroed_gradients: entries of gradients to the context, so far, that were not finite.
    """

    name: ClassVar[str] = "backbone"
    default_checkpoint: ClassVar[str | None] = None
    summary: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    extra: ClassVar[str | None] = None
    large_products: ClassVar[bool] = False
    flat_is_constant: ClassVar[bool] = False
    multivariate: ClassVar[bool] = False
    loss_kind: ClassVar[Literal["squared", "absolute"]] = "squared"

    def __init__(
        self,
        *,
        context_length: int,
        native_horizon: int,
        min_context: int = 1,
        max_context: int | None = None,
        quantile_levels: Sequence[float] = (),
        checkpoint: str | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        if context_length < min_context or (max_context is not None and context_length > max_context):
            limits = f"{min_context} or more" if max_context is None else f"between {min_context} and {max_context}"
            raise SettingError(f"context_length={context_length}: the backbone {self.name!r} takes {limits} steps")
        if not np.allclose(quantile_levels, 1 - np.asarray(quantile_levels)[::-1]):
            raise SettingError(f"quantile_levels={tuple(quantile_levels)}: expected levels symmetric around 0.5")
        self.context_length = context_length
        self.native_horizon = native_horizon
        self.min_context = min_context
        self.max_context = max_context
        self.quantile_levels = tuple(quantile_levels)
        self.checkpoint = checkpoint
        self.revision = revision
        self.zeroed_gradients = 0
        self._trainable = False

    # What a subclass says

    @abstractmethod
    def native(self, context: Tensor) -> Tensor:
        """One block: `[series, time]` to `[series, native_horizon]`, or `[series, native_horizon, level]`."""

    @classmethod
    @abstractmethod
    def from_checkpoint(
        cls,
        checkpoint: str | None,
        *,
        revision: str | None = None,
        context_length: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Backbone:
        """Load weights from a directory or a hub name; None means the default checkpoint."""

    def label_start(self, context_length: int) -> int:
        """Step of the window `context + future` at which the labels of `loss` begin (the context's end here)."""
        return context_length

    def label_horizon(self, horizon: int) -> int:
        """Future steps that the window must hold for `loss`, when the caller is after `horizon` of them."""
        return horizon

    def loss(
        self, context: Tensor, labels: Tensor, *, horizon: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """The model's own training loss, per series and position: `[series, position]`.

        Args:
            context: `[series, time]`.
            labels: `[series, label]`: the window `context + future` from `label_start` on.
            horizon: steps of the forecast that the caller is after, for losses that depend on it.
            generator: randomness of losses that sample, the same draws for every series, so that losses under equal
                seeds can be compared; where None, new draws for every series and call.
        """
        del generator
        return (self(context, horizon or labels.shape[1]) - labels).square().mean(dim=1, keepdim=True)

    # Forecasting

    def forward(self, context: Tensor, horizon: int | None = None) -> Tensor:
        """Point forecast, differentiable with respect to the context: `[series, time]` to `[series, horizon]`."""
        return self._point(self._roll(context, horizon or self.native_horizon))

    def distribution(
        self, context: Tensor, horizon: int | None = None, *, generator: torch.Generator | None = None
    ) -> Forecast:
        """Point forecast and, where the backbone has them, quantiles."""
        del generator
        blocks = self._roll(context, horizon or self.native_horizon)
        if blocks.ndim == 2:
            return Forecast(blocks)
        return Forecast(self._point(blocks), blocks.sort(dim=-1).values, self.quantile_levels)

    def joint(self, windows: Tensor, horizon: int | None = None) -> Forecast:
        """Forecast in which the channels of a window see each other: `[batch, time, channel]` to series, no gradients.

        The series of the forecast are ordered by window and then by channel.

        Raises:
            SettingError: the model knows one series at a time only.
        """
        raise SettingError(
            f"adapter='joint': the backbone {self.name!r} takes one series at a time; use one that takes all channels "
            "together, such as 'chronos-2'"
        )

    def forecast(self, context: Any, horizon: int | None = None, *, batch_size: int = 512, seed: int = 0) -> Forecast:
        """Forecast outside of training: no gradients, large batches.

        Args:
            context: `[series, time]`, anything that `numpy.asarray` takes.
            horizon: steps ahead, the native horizon by default.
            batch_size: series that go through the model at once.
            seed: randomness of backbones that sample.

        Raises:
            SettingError: wrong shape, fewer steps than `min_context`, or values that are not finite.
        """
        weights = next(self.parameters())
        values = np.asarray(context.detach().cpu() if isinstance(context, Tensor) else context)
        if values.ndim != 2:
            raise SettingError(f"context has shape {list(values.shape)}; expected [series, time]")
        if not np.isfinite(values).all():
            raise SettingError(f"context holds values that are not finite, first in series {_first_bad(values)}")
        if horizon is not None and horizon < 1:
            raise SettingError(f"horizon={horizon}: expected 1 or more")
        # a context in the dtype of bfloat16 weights would have lost its digits before it is normalised
        dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
        rows = torch.as_tensor(values, dtype=dtype, device=weights.device)
        generator = torch.Generator(device=weights.device)
        with torch.inference_mode():
            parts = [  # the same seed for every part, so that batch_size does not change a forecast
                self.distribution(part, horizon, generator=generator.manual_seed(seed))
                for part in rows.split(batch_size)
            ]
        quantiles = [part.quantiles for part in parts if part.quantiles is not None]
        return Forecast(
            torch.cat([part.mean for part in parts]), torch.cat(quantiles) if quantiles else None, parts[0].levels
        )

    def check_context(self, length: int) -> None:
        """Raise a SettingError when `length` steps are too few for the model."""
        if length < self.min_context:
            raise SettingError(
                f"the context has {length} steps, but the backbone {self.name!r} needs at least {self.min_context}"
            )

    def _roll(self, context: Tensor, horizon: int) -> Tensor:
        """Native blocks until the horizon is reached; each block's point forecast is appended to the context."""
        self.check_context(context.shape[1])
        if self.max_context is not None:
            context = context[:, -self.max_context :]
        length = context.shape[1]
        blocks = [self.one_block(context)]
        while sum(block.shape[1] for block in blocks) < horizon:
            context = torch.cat([context, self._point(blocks[-1])], dim=1)[:, -length:]
            blocks.append(self.one_block(context))
        return torch.cat(blocks, dim=1)[:, :horizon]

    @recomputable
    def one_block(self, context: Tensor, steps: int | None = None) -> Tensor:
        """One step of a rollout: `native`, with the guard around it.

        `steps` is for models whose blocks may be shorter than the longest; their `native` takes it as well.
        """
        context = self.guarded(context)
        native: Callable[..., Tensor] = self.native
        model = native if steps is None else partial(native, steps=steps)
        return around_flat(model, context) if self.flat_is_constant else model(context)

    def guarded(self, context: Tensor) -> Tensor:
        """The context itself, `[series, time]`; entries of its gradient that are not finite will be zero."""
        return with_finite_gradient(context, self._zeroed)

    def _zeroed(self, entries: int, series: int) -> None:
        if not self.zeroed_gradients:
            notify(
                f"the gradient of the backbone {self.name!r} to its context is not finite in {entries} steps of "
                f"{series} series: they count as zero, now and later (told once; zeroed_gradients counts them)"
            )
        self.zeroed_gradients += entries

    def _point(self, block: Tensor) -> Tensor:
        if block.ndim == 2:
            return block
        return block[..., int(np.argmin(np.abs(np.asarray(self.quantile_levels) - 0.5)))]

    # Frozen weights

    def freeze(self) -> Backbone:
        """Take all weights out of training; dropout stays off whatever mode the surrounding module is in."""
        self._trainable = False
        self.requires_grad_(False)
        self.eval()
        return self

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode and self._trainable)
        return self

    @contextmanager
    def unfrozen(self) -> Iterator[Backbone]:
        """Full fine-tuning: weights and dropout take part in training inside this context."""
        self._trainable = True
        self.requires_grad_(True)
        try:
            yield self
        finally:
            self.freeze()

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes, dtypes and bytes of all weights, independent of how files are sharded."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def spec(self) -> str:
        """The string that `load_backbone` takes to load this backbone again."""
        source = "" if self.checkpoint is None else f":{self.checkpoint}"
        return f"{self.name}{source}" + (f"@{self.revision}" if source and self.revision else "")


class ModuleBackbone(Backbone):
    """Any `torch.nn.Module` that maps `[series, context_length]` to `[series, horizon]`.

    The native horizon is read off one forward of zeros.
    """

    name = "module"
    summary = "any torch.nn.Module of your own"

    def __init__(self, module: nn.Module, *, context_length: int) -> None:
        weights = next(module.parameters(), torch.zeros(()))
        try:
            with torch.no_grad():
                block = module(torch.zeros(1, context_length, dtype=weights.dtype, device=weights.device))
        except RuntimeError as error:
            raise SettingError(
                f"{type(module).__name__} does not take an input [1, {context_length}] ({str(error).splitlines()[0]}): "
                "pass the context_length that it was made for"
            ) from error
        if not isinstance(block, Tensor) or block.ndim != 2 or block.shape[0] != 1:
            shape = list(block.shape) if isinstance(block, Tensor) else type(block).__name__
            raise SettingError(
                f"{type(module).__name__} gives {shape} for an input [1, {context_length}]; expected [1, horizon]"
            )
        super().__init__(  # nothing is known of other lengths: most modules fail on them with a shape error
            context_length=context_length,
            min_context=context_length,
            max_context=context_length,
            native_horizon=block.shape[1],
        )
        self.module = module
        # a module without weights still needs a dtype and a device for what is fed to it
        self.register_buffer("_anchor", torch.zeros((), dtype=weights.dtype, device=weights.device), persistent=False)
        self.freeze()

    _anchor: Tensor

    def native(self, context: Tensor) -> Tensor:
        return self.module(context.to(self._anchor.dtype)).to(context.dtype)

    @classmethod
    def from_checkpoint(cls, checkpoint: str | None, **kwargs: Any) -> Backbone:
        raise SettingError("a backbone made from your own module cannot be loaded by name; pass the object again")


def _first_bad(values: np.ndarray) -> int:
    return int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
