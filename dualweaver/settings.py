"""The arguments of `DualWeaver`, each declared once: name, type, default, help, and what it may be.

`Options` feeds the estimator (its constructor and documentation), the check before a fit (`FitSettings`) and the
command line (`dualweaver.cli.options`).
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import numpy as np
from torch import nn

from dualweaver.adapters import ADAPTERS, Adapter, DualWeaverAdapter, FineTune, Joint, make_adapter
from dualweaver.compute.limits import CAUTIOUS, check_devices, parse_bytes
from dualweaver.compute.seeding import seeded
from dualweaver.errors import SettingError
from dualweaver.method.fusion import FUSIONS

__all__ = ["AUTO", "PRECISIONS", "FitSettings", "Options", "documented", "option_help"]

AUTO = "auto"  # the adapter that validation chooses
PRECISIONS = ("32", "bf16", "auto")

Check = Callable[[Any], str | None]  # what was expected of a value, or None where it is fine
Class = TypeVar("Class", bound=type)


def _count(value: Any) -> str | None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return None if whole and value >= 1 else "a whole number, 1 or more"


def _count_or_none(value: Any) -> str | None:
    return None if value is None else _count(value)


def _among(*known: str) -> Check:
    return lambda value: None if value in known else f"one of {', '.join(known)}"


def _share_or_rows(value: Any) -> str | None:
    fine = 0 < value < 1 if isinstance(value, float) else value >= 1
    return None if fine else "a share in (0, 1) or a number of rows"


def _positive_or_none(value: Any) -> str | None:
    return None if value is None or value > 0 else "more than 0"


def _not_negative(value: Any) -> str | None:
    return None if value >= 0 else "0 or more"


def _option(default: Any, help: str, *, check: Check | None = None, more: str = "", decides: bool = True) -> Any:
    """A field of `Options`.

    Args:
        default: its value where the user gives none.
        help: a line for the command line and for the documentation.
        check: of its value before a fit; None where another part of the package checks it.
        more: what the documentation says beyond `help`.
        decides: whether a fit on the same table may end with other bits for it.
    """
    return dataclasses.field(default=default, metadata={"help": help, "check": check, "more": more, "fit": decides})


@dataclass(repr=False, eq=False)
class Options:
    """What `DualWeaver` takes; fields are in the order of its constructor."""

    backbone: str | nn.Module = _option(
        "fracast",
        "name, or name:checkpoint; see `dualweaver backbones`",
        more='Such as "ttm", "ttm:directory" or "timer:hub/name@revision". Also a `Backbone`, or a `torch.nn.Module` '
        "that maps `[series, context]` to `[series, horizon]`.",
        decides=False,
    )
    horizon: int = _option(
        96, "steps to forecast", check=_count, more="Longer than the backbone's own is rolled forward."
    )
    _: KW_ONLY
    context_length: int | None = _option(
        None,
        "past steps that a forecast sees",
        check=_count_or_none,
        more="The backbone's default where None; fewer, with a notice, where the frame is short and the backbone can.",
    )
    adapter: str = _option(
        "dualweaver",
        "dualweaver, adapts, fine-tune, zero-shot, joint or auto",
        check=_among(AUTO, *sorted(ADAPTERS)),
        more='"auto" trains "dualweaver", "fine-tune", and "dualweaver" on the fine-tuned backbone, and keeps the one '
        'with the lowest validation error (`adapter_`, `fine_tuned_`). "joint" trains nothing: the backbone takes all '
        'channels together, where it can (chronos-2); "auto" tries that as well then.',
    )
    fusion: str = _option(
        "mlp",
        "mlp (one step at a time) or cnn (five steps)",
        check=_among(*sorted(FUSIONS)),
        more="Mixes the channels.",
    )
    objective: str = _option(
        "reconstruction",
        "reconstruction (squared error of the forecast) or paper (the published loss)",
        check=_among("paper", "reconstruction"),
    )
    regularisation: float = _option(0.0, 'weight of the collapse regulariser in "reconstruction"', check=_not_negative)
    context_filter: bool = _option(
        True,
        "filter contexts before the channels are mixed",
        more='See `dualweaver.method.ContextFilter`; in "reconstruction" only, the published method has none.',
    )
    fine_tune: bool = _option(False, "fine-tune the backbone first, then freeze and adapt it")
    max_epochs: int = _option(10, "epochs at most", check=_count)
    batch_size: int = _option(32, "windows of a step of the optimizer", check=_count)
    learning_rate: float | None = _option(
        None, "of the optimizer", check=_positive_or_none, more="The adapter's own where None."
    )
    window_stride: int | None = _option(
        None,
        "steps between training windows",
        check=_count_or_none,
        more="None leaves one to two thousand an epoch, fewer for a costly backbone or many channels.",
    )
    validation_size: float | int = _option(
        0.2,
        "share of the rows, or their number, at the end of every entity that nothing is trained on",
        check=_share_or_rows,
        more="They choose how much of the filter's edit forecasts apply, which channels go back to zero-shot, and how "
        "wide intervals are.",
    )
    targets: Sequence[Any] | None = _option(
        None,
        "columns to forecast, all by default",
        more="The others only feed the fusion, as past covariates.",
        decides=False,
    )
    quantiles: Sequence[float] | None = _option(
        None, "levels in (0, 1) that `predict` adds where it is not told otherwise", decides=False
    )
    time_column: Any = _option(None, "column with the time stamps; found by itself where possible", decides=False)
    entity_column: Any = _option(
        None, "column that tells independent systems apart, such as machines or sites", decides=False
    )
    freq: Any = _option(None, "step of the time stamps (pandas alias), where it cannot be inferred", decides=False)
    missing: str = _option("interpolate", "interpolate, ffill or raise", decides=False)
    missing_values: Sequence[Any] = _option(
        (), "numbers or text that stand for a missing value, such as -9999", decides=False
    )
    channel_sample: int | None = _option(
        None,
        'how many targets, drawn anew at every step, "dualweaver" trains on; all where None',
        check=_count_or_none,
        more="For wide data: every column still feeds the fusion, and every target is validated.",
    )
    precision: str = _option(
        "32",
        "of the backbone's weights: 32, bf16 or auto",
        check=_among(*PRECISIONS),
        more='"auto" takes bfloat16 where that is faster and as accurate.',
    )
    memory_budget: str | float | None = _option(
        None,
        "bytes that training may take on a device, such as 2GB",
        more="The fastest way to train within them is chosen; the effective batch stays `batch_size`. See "
        "docs/scaling.md.",
    )
    devices: int = _option(
        1,
        "processes that share a batch, all of them running this script under torchrun",
        more="See docs/scaling.md.",
    )
    compile: bool = _option(False, "train through `torch.compile` where that works")
    seed: int = _option(0, "governs all randomness")
    verbose: bool = _option(True, "show progress and a summary", decides=False)


FIELDS = {field.name: field for field in dataclasses.fields(Options)}


def option_help(name: str) -> str:
    """The line of help of an option."""
    return str(FIELDS[name].metadata["help"])


def documented(owner: Class) -> Class:
    """Put every option's help in the place of `{options}` in the docstring of a class."""
    parts = []
    for name, field in FIELDS.items():
        text = f"{name}: {field.metadata['help']}. {field.metadata['more']}".rstrip()
        parts.append(textwrap.fill(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 12))
    owner.__doc__ = (owner.__doc__ or "").replace("        {options}", "\n".join(parts))
    return owner


class FitSettings(Options):
    """The options of one fit, checked."""

    @classmethod
    def checked(cls, source: Any) -> FitSettings:
        """Read the options off an estimator; raise a SettingError that names the first wrong one."""
        settings = cls(**{name: getattr(source, name) for name in FIELDS})
        for name, field in FIELDS.items():
            value, check = getattr(settings, name), field.metadata["check"]
            if check is not None and (expected := check(value)) is not None:
                raise SettingError(f"{name}={value!r}: expected {expected}")
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

    def decisive(self) -> dict[str, Any]:
        """The options that decide on the bits of a fit, by name."""
        return {name: getattr(self, name) for name, field in FIELDS.items() if field.metadata["fit"]}

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

    def candidates(self, multivariate: bool = False) -> list[FitSettings]:
        """What is trained, in this order, for validation to choose from; zero-shot, which all fall back to, is implied.

        For a backbone that can take all channels together, "auto" tries that first. Its last one adapts the
        backbone that the one before it has fine-tuned.
        """
        if self.adapter != AUTO:
            return [self]
        steps = [(DualWeaverAdapter.name, False), (FineTune.name, False), (DualWeaverAdapter.name, True)]
        steps = [(Joint.name, False), *steps] if multivariate else steps
        return [dataclasses.replace(self, adapter=name, fine_tune=tuned) for name, tuned in steps]

    def make_adapter(self, channels: int, targets: Sequence[int]) -> Adapter:
        """The untrained adapter for so many channels, of which those at `targets` are forecast."""
        extra: dict[str, Any] = {}
        name = DualWeaverAdapter.name if self.adapter == AUTO else self.adapter
        if name == DualWeaverAdapter.name:
            extra = {"fusion": self.fusion, "objective": self.objective, "regularisation": self.regularisation}
            extra |= {"channel_sample": self.channel_sample, "context_filter": self.context_filter}
        with seeded(self.seed):
            adapter = make_adapter(name, channels, targets, **extra)
        adapter.series_at_once = self.series_at_once
        return adapter
