"""Where the time and the memory of training go: a few real steps, told apart by phase and by holder."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dualweaver.adapters import Adapter, make_adapter
from dualweaver.backbones.precision import load_in_precision, precision_of
from dualweaver.compute.allocator import keep_freed_memory, return_freed_memory
from dualweaver.compute.products import FLOP_FORMULAS, product
from dualweaver.compute.recompute import recomputing
from dualweaver.compute.seeding import seeded
from dualweaver.errors import SettingError
from dualweaver.planning.memory import Holdings, record_memory, resident_bytes, storage_bytes
from dualweaver.planning.step import PHASES, Shape, Stopwatch, TrainingStep, training_device
from dualweaver.settings import Options

__all__ = ["Profile", "product_rate", "profile", "profile_step"]

SIZE = 1024  # of the products that are timed
WEIGHTS, STATE, DATA = "weights", "optimizer state", "data"


@dataclass(frozen=True)
class Profile:
    """What a few steps of training took.

    Attributes:
        what: backbone, adapter, sizes and precision.
        seconds: of a step, by phase; medians. A phase has the time that no phase inside of it has.
        windows_per_second: of all phases together.
        flops: floating-point operations of the matrix products of a step.
        rate: floating-point operations a second of a large product, measured here.
        holdings: memory over one step.
        resident: how far the process grew in the second step, plus weights and the optimizer's state: a second opinion
            on the peak, from the system, or on a GPU from torch's own allocator. None where the system does not tell.
    """

    what: dict[str, Any]
    seconds: dict[str, float]
    windows_per_second: float
    flops: float
    rate: float
    holdings: Holdings
    resident: int | None

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of the time of a step that its products would take at the measured rate."""
        return self.flops / self.rate / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **self.what,
            "windows_per_second": self.windows_per_second,
            "seconds": self.seconds,
            "flops": self.flops,
            "product_flops_per_second": self.rate,
            "share_of_product_rate": self.share,
            "peak_bytes": self.holdings.peak,
            "resident_bytes": self.resident,
            "bytes_at_peak": self.holdings.at_peak(),
            "memory": asdict(self.holdings),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    def __rich__(self) -> Group:
        times = Table("phase", "seconds a step", "share", title=", ".join(f"{k} {v}" for k, v in self.what.items()))
        for phase, seconds in self.seconds.items():
            times.add_row(phase, f"{seconds:.4f}", f"{seconds / self.step_seconds:.1%}")
        times.add_section()
        times.add_row("step", f"{self.step_seconds:.4f}", f"{self.windows_per_second:.3g} windows/s")
        times.add_row("of the rate of products", f"{self.rate / 1e9:.4g} Gflop/s", f"{self.share:.1%}")
        memory = Table("held at the peak by", "MB", "share")
        peak = self.holdings.peak
        for holder, size in self.holdings.at_peak().items():
            if size:
                memory.add_row(holder, f"{size / 1e6:.2f}", f"{size / peak:.1%}")
        memory.add_section()
        memory.add_row("peak", f"{peak / 1e6:.2f}", "100.0%")
        if self.resident is not None:
            memory.add_row("the system's count", f"{self.resident / 1e6:.2f}", f"{self.resident / peak:.1%}")
        return Group(times, memory)

    def plot(self) -> Figure:
        """Memory over one step, stacked by holder."""
        figure = Figure(figsize=(10, 5), layout="constrained")
        axes = figure.subplots()
        held = {holder: values for holder, values in self.holdings.held.items() if any(values)}
        axes.stackplot(
            [1000 * moment for moment in self.holdings.seconds],
            *[[value / 1e6 for value in values] for values in held.values()],
            labels=list(held),
            step="post",
            colors=_colours(held),
        )
        axes.set_xlabel("milliseconds of a step (under the profiler, which slows it down)")
        axes.set_ylabel("MB")
        axes.set_title(", ".join(f"{key} {value}" for key, value in self.what.items()), fontsize=9)
        axes.margins(x=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)
        return figure


def _colours(holders: dict[str, list[int]]) -> list[Any]:
    from matplotlib import colormaps

    fixed = {WEIGHTS: "0.55", STATE: "0.7", DATA: "0.8", "weight gradients": "C3", "workspace": "C1"}
    blocks = [holder for holder in holders if holder not in fixed]
    shades = colormaps["viridis"].resampled(max(len(blocks), 1))
    return [fixed.get(holder) or shades(blocks.index(holder)) for holder in holders]


def profile(
    backbone: str | nn.Module = Options.backbone,
    *,
    channels: int = 7,
    batch_size: int = 4,
    horizon: int = Options.horizon,
    context_length: int | None = Options.context_length,
    adapter: str | Adapter = Options.adapter,
    objective: str = Options.objective,
    fusion: str = Options.fusion,
    precision: str = Options.precision,
    micro_batch: int | None = None,
    recompute: Sequence[str] = (),
    steps: int = 3,
    seed: int = Options.seed,
) -> Profile:
    """Profile training on made-up data of some shape: the values do not matter to time and memory.

    Args:
        backbone, horizon, context_length, objective, fusion, precision: as for `DualWeaver`.
        channels: all of them are targets.
        batch_size: windows of a step of the optimizer.
        adapter: a name, or an adapter for as many channels.
        micro_batch: windows at once, all by default.
        recompute: parts of the backbone to compute again, see `dualweaver.compute.recompute`.
        steps: that are timed; two more are run before them, and two after.
        seed: of data, weights of the adapter and dropout.

    Raises:
        SettingError: an argument is out of range.
    """
    for name, value in (("channels", channels), ("batch_size", batch_size), ("horizon", horizon), ("steps", steps)):
        if value < 1:
            raise SettingError(f"{name}={value!r}: expected a whole number, 1 or more")
    if micro_batch is not None and (micro_batch < 1 or batch_size % micro_batch):
        raise SettingError(f"micro_batch={micro_batch!r}: expected a divisor of batch_size={batch_size}")
    loaded = load_in_precision(backbone, precision, context_length).to(training_device())
    if isinstance(adapter, str):
        extra = {"objective": objective, "fusion": fusion} if adapter == "dualweaver" else {}
        with seeded(seed):
            adapter = make_adapter(adapter, channels, range(channels), **extra)
    shape = Shape(channels, batch_size, context_length or loaded.context_length, horizon)
    thawed: AbstractContextManager[object] = loaded.unfrozen() if adapter.trains_backbone else nullcontext()
    with thawed, recomputing(loaded, recompute):
        return profile_step(TrainingStep(adapter, loaded, shape, micro_batch=micro_batch, seed=seed), steps)


def profile_step(step: TrainingStep, steps: int = 3) -> Profile:
    """Profile one step of training, as it is set up."""
    with return_freed_memory():
        step()  # what libraries load and allocate once is there from here on
        step.forget_gradients()
        grown = _growth(step)
    times = []
    with keep_freed_memory():  # as in training
        for _ in range(steps):
            step.forget_gradients()
            step.watch = Stopwatch(step.device)
            step()
            times.append(step.watch.seconds)
    step.watch = None
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        step.forget_gradients()
        step()
    step.forget_gradients()
    weights = [*step.backbone.parameters(), *step.backbone.buffers(), *step.adapter.parameters()]
    constant = {
        WEIGHTS: storage_bytes(weights),
        STATE: storage_bytes(part for state in step.optimizer.state.values() for part in state.values()),
        DATA: storage_bytes([step.data.train_windows.values]),
    }
    holdings = record_memory(step, step.backbone, step.trained, constant, step.device.type)
    dtype = next(step.backbone.parameters(), torch.zeros(())).dtype
    what = {
        "backbone": step.backbone.name,
        "adapter": step.adapter.name,
        "channels": step.shape.channels,
        "windows": step.shape.batch_size,
        "at once": step.micro_batch,
        "context": step.shape.context_length,
        "horizon": step.shape.horizon,
        "precision": precision_of(step.backbone),
    }
    seconds = {phase: statistics.median(each[phase] for each in times) for phase in PHASES}
    return Profile(
        what,
        seconds,
        step.shape.batch_size / sum(seconds.values()),
        float(counter.get_total_flops()),
        product_rate(dtype, step.device.type),
        holdings,
        None if grown is None else grown + constant[WEIGHTS] + constant[STATE],
    )


def _growth(step: TrainingStep) -> int | None:
    """How many bytes more than before there were during a step, by a count that is not ours."""
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(step.device)
        before = torch.cuda.memory_allocated(step.device)
        step()
        return torch.cuda.max_memory_allocated(step.device) - before
    marked = _resident_mark()
    step()
    return None if marked is None else max(0, (resident_bytes("VmHWM") or 0) - marked)


@lru_cache
def product_rate(dtype: torch.dtype, device: str) -> float:
    """Floating-point operations a second of a product of large matrices, the best of a few, measured once a process."""
    left, right = (torch.ones(SIZE, SIZE, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        float(product(left, right)[0, 0])  # waits for a device
        best = min(best, time.perf_counter() - start)
    return 2 * SIZE**3 / best


def _resident_mark() -> int | None:
    """The size of the process now; the system forgets how large it has been. None where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident_bytes()
