"""The arguments of a fit, checked once for everyone who needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dualweaver.adapters import ADAPTERS, Adapter, DualWeaverAdapter, FineTune, make_adapter
from dualweaver.errors import SettingError
from dualweaver.planning.limits import CAUTIOUS, check_devices, parse_bytes
from dualweaver.precision import PRECISIONS
from dualweaver.seeding import seeded
from dualweaver.weaver import FUSIONS

__all__ = ["AUTO", "FitSettings"]

AUTO = "auto"  # the adapter that validation chooses


@dataclass(frozen=True)
class FitSettings:
    """The arguments of `DualWeaver` that fitting needs, checked."""

    horizon: int
    context_length: int | None
    adapter: str
    fusion: str
    objective: str
    regularisation: float
    fine_tune: bool
    max_epochs: int
    batch_size: int
    learning_rate: float | None
    window_stride: int | None
    validation_size: float | int
    seed: int
    verbose: bool
    precision: str = "32"
    memory_budget: str | float | None = None
    devices: int = 1
    channel_sample: int | None = None
    compile: bool = False
    context_filter: bool = True

    @classmethod
    def checked(cls, source: Any) -> FitSettings:
        """Read the arguments off an estimator; raise a SettingError that names the first wrong one."""
        settings = cls(**{name: getattr(source, name) for name in cls.__dataclass_fields__})
        for name in ("horizon", "context_length", "max_epochs", "batch_size", "window_stride", "channel_sample"):
            value = getattr(settings, name)
            if name in ("context_length", "window_stride", "channel_sample") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SettingError(f"{name}={value!r}: expected a whole number, 1 or more")
        for name, known in (
            ("adapter", [AUTO, *sorted(ADAPTERS)]),
            ("fusion", sorted(FUSIONS)),
            ("objective", ["paper", "reconstruction"]),
            ("precision", PRECISIONS),
        ):
            if getattr(settings, name) not in known:
                raise SettingError(f"{name}={getattr(settings, name)!r}: expected one of {', '.join(known)}")
        size = settings.validation_size
        if not (0 < size < 1 if isinstance(size, float) else size >= 1):
            raise SettingError(f"validation_size={size!r}: expected a share in (0, 1) or a number of rows")
        if settings.learning_rate is not None and not settings.learning_rate > 0:
            raise SettingError(f"learning_rate={settings.learning_rate!r}: expected more than 0")
        if not settings.regularisation >= 0:
            raise SettingError(f"regularisation={settings.regularisation!r}: expected 0 or more")
        if settings.memory_budget is not None:
            parse_bytes(settings.memory_budget)
        check_devices(settings.devices, settings.batch_size)
        if settings.devices > 1 and settings.memory_budget is not None:
            raise SettingError(
                "memory_budget plans for one process: with several, see what `dualweaver plan --devices` suggests"
            )
        if settings.precision == "bf16" and settings.trains_backbone:
            raise SettingError("precision='bf16' is for frozen weights: fine-tuning takes '32'")
        return settings

    @property
    def loaded_precision(self) -> str:
        """Small steps of training would be lost in bfloat16."""
        return "32" if self.trains_backbone else self.precision

    @property
    def series_at_once(self) -> int | None:
        """Limit of series that go through the backbone at once before there is a plan; None without a budget."""
        return None if self.memory_budget is None else CAUTIOUS

    @property
    def trains_backbone(self) -> bool:
        return self.fine_tune or self.adapter in (AUTO, FineTune.name)

    def rungs(self) -> list[FitSettings]:
        """What is trained, in this order, for validation to choose from; zero-shot, which all fall back to, is implied.

        The last one of "auto" adapts the backbone that the one before it has fine-tuned.
        """
        if self.adapter != AUTO:
            return [self]
        steps = ((DualWeaverAdapter.name, False), (FineTune.name, False), (DualWeaverAdapter.name, True))
        return [dataclasses.replace(self, adapter=name, fine_tune=tuned) for name, tuned in steps]

    def make_adapter(self, channels: int, targets: Sequence[int]) -> Adapter:
        extra: dict[str, Any] = {}
        name = DualWeaverAdapter.name if self.adapter == AUTO else self.adapter
        if name == DualWeaverAdapter.name:
            extra = {"fusion": self.fusion, "objective": self.objective, "regularisation": self.regularisation}
            extra |= {"channel_sample": self.channel_sample, "context_filter": self.context_filter}
        with seeded(self.seed):
            adapter = make_adapter(name, channels, targets, **extra)
        adapter.series_at_once = self.series_at_once
        return adapter
