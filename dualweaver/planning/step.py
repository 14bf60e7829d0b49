"""One step of training on made-up data, in the phases that a profile tells apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualweaver.adapters import Adapter, DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.data.module import WindowDataModule
from dualweaver.data.windows import WindowDataset
from dualweaver.errors import SettingError

__all__ = ["PHASES", "Shape", "Stopwatch", "TrainingStep", "training_device"]

PHASES = ("data", "fusion", "frozen forward", "backward", "optimizer")


@dataclass(frozen=True)
class Shape:
    """Sizes of a step of the optimizer: windows of `context_length + horizon` steps, all channels being targets."""

    channels: int
    batch_size: int
    context_length: int
    horizon: int


class Stopwatch:
    """Time by phase; a phase inside of another one stops the outer one's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.open: list[str] = []
        self.since = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._turn()
        self.open.append(name)
        try:
            yield
        finally:
            self._turn()
            self.open.pop()

    def _turn(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        if self.open:
            self.seconds[self.open[-1]] += now - self.since
        self.since = now


def training_device() -> torch.device:
    """Where training will run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class TrainingStep:
    """What training does between two steps of the optimizer, without Lightning around it.

    Args:
        adapter, backbone: both stay where they are; the adapter moves to the backbone's device.
        shape: of the step.
        micro_batch: windows that go through at once, all by default; their number divides the batch.
        seed: of data and dropout.
    """

    def __init__(
        self, adapter: Adapter, backbone: Backbone, shape: Shape, *, micro_batch: int | None = None, seed: int = 0
    ) -> None:
        self.backbone, self.shape = backbone, shape
        self.device = next(backbone.parameters(), torch.zeros(())).device
        self.adapter = adapter.to(self.device).train()
        self.micro_batch = micro_batch or shape.batch_size
        self.accumulate = shape.batch_size // self.micro_batch
        self.watch: Stopwatch | None = None
        length = shape.context_length + max(shape.horizon, adapter.future_steps(backbone, shape.horizon))
        generator = torch.Generator().manual_seed(seed)
        table = 0.1 * torch.randn(length + shape.batch_size, shape.channels, generator=generator).cumsum(dim=0)
        windows = WindowDataset(table, torch.arange(shape.batch_size), length)
        self.data = WindowDataModule(windows, windows, batch_size=self.micro_batch, seed=seed)
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(())
        self.references: dict[int, Tensor] = {}
        self.trained = [weight for weight in adapter.parameters() if weight.requires_grad]
        if adapter.trains_backbone:
            self.trained += [weight for weight in backbone.parameters() if weight.requires_grad]
        if not self.trained:
            raise SettingError(f"adapter={adapter.name!r} has nothing to train")
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)
        self.seed = seed
        self.steps = 0

    def __call__(self) -> Tensor:
        """A whole step; the loss."""
        loss = torch.zeros(())
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + self.steps)
            for _ in range(self.accumulate):
                with self._phase("data"):
                    positions, window = self._next()
                reference = self._reference(positions, window)
                with self._phase("backward"), self._seen():
                    part = self.adapter.objective(
                        self.backbone, window, self.shape.context_length, self.shape.horizon, reference
                    )
                    (part / self.accumulate).backward()
                loss = loss + part.detach().cpu() / self.accumulate
            with self._phase("optimizer"):
                nn.utils.clip_grad_norm_(self.trained, 1.0)
                self.optimizer.step()
                self.adapter.project()
        self.steps += 1
        return loss

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()

    def _next(self) -> tuple[Tensor, Tensor]:
        found = next(self.batches, None)
        if found is None:
            self.batches = iter(self.data.train_dataloader())
            found = next(self.batches)
        return found[0], found[1].to(self.device)

    def _reference(self, positions: Tensor, window: Tensor) -> Tensor | None:
        """As in training, it is computed when a window is seen for the first time."""
        if not self.adapter.needs_reference:
            return None
        shape = self.shape
        for position, one in zip(positions.tolist(), window, strict=True):
            if position not in self.references:
                found = self.adapter.reference_loss(self.backbone, one[None], shape.context_length, shape.horizon)
                self.references[position] = found
        return torch.cat([self.references[position] for position in positions.tolist()])

    def _phase(self, name: str) -> Any:
        return nullcontext() if self.watch is None else self.watch.phase(name)

    @contextmanager
    def _seen(self) -> Iterator[None]:
        """Inside, fusion and frozen model tell the stopwatch; the rest of it is the backward pass."""
        watch = self.watch
        if watch is None:
            yield
            return

        def timed(owner: nn.Module, method: str, name: str) -> None:
            original: Callable[..., Any] = getattr(owner, method)

            def run(*args: Any, **kwargs: Any) -> Any:
                with watch.phase(name):
                    return original(*args, **kwargs)

            owner.__dict__[method] = run

        phases: list[tuple[nn.Module, str, str]]
        phases = [(self.backbone, "loss", "frozen forward"), (self.backbone, "forward", "frozen forward")]
        phases += [(owner, method, "fusion") for owner, method in _fusion(self.adapter)]
        for owner, method, name in phases:
            timed(owner, method, name)
        try:
            yield
        finally:
            for owner, method, _ in phases:
                del owner.__dict__[method]


def _fusion(adapter: Adapter) -> list[tuple[nn.Module, str]]:
    """The methods that write series for the backbone."""
    if isinstance(adapter, DualWeaverAdapter):
        return [(adapter.weaver, "surrogates"), (adapter.weaver, "context_surrogates")]
    return [(adapter, "encode")]
