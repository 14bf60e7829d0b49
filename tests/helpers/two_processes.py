"""What each of two processes runs; started by `test_processes.py` through torchrun.

torchrun --standalone --nproc-per-node 2 two_processes.py ddp|fsdp OUTPUT
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from small_backbones import FACTORIES
from toy_backbones import NormalisedToy
from toys import waves

from dualweaver import DualWeaver
from dualweaver.adapters import DualWeaverAdapter
from dualweaver.data.module import WindowDataModule
from dualweaver.data.windows import WindowDataset, window_starts
from dualweaver.fit.module import TrainingSettings
from dualweaver.fit.training import train_adapter
from dualweaver.planning.sharding import shard_blocks

CONTEXT, HORIZON, CHANNELS, BATCH = 12, 4, 3, 8


def windows(rows: int, seed: int) -> WindowDataset:
    steps = torch.arange(rows)[:, None] / 4 + torch.arange(CHANNELS)
    noise = torch.randn(rows, CHANNELS, generator=torch.Generator().manual_seed(seed))
    length = CONTEXT + HORIZON
    return WindowDataset(torch.sin(steps) + 0.1 * noise, window_starts([rows], length), length)


def trained(objective: str, **settings: Any) -> dict[str, Any]:
    """What training leaves: weights and course."""
    torch.manual_seed(0)
    adapter = DualWeaverAdapter(CHANNELS, range(CHANNELS), objective=objective)  # with dropout
    data = WindowDataModule(windows(111, 0), windows(60, 1), stride=2, batch_size=BATCH, seed=3)
    course = train_adapter(
        adapter,
        NormalisedToy(CONTEXT, HORIZON),
        data,
        TrainingSettings(max_epochs=3, learning_rate=0.02, seed=3, **settings),
        context_length=CONTEXT,
        horizon=HORIZON,
    )
    return {"weights": adapter.state_dict(), "history": course.history}


def gradients(*, sharded: bool) -> dict[str, Any]:
    """Of an adapter around a small Timer, and what share of a block's weights this process holds."""
    torch.manual_seed(0)
    backbone = FACTORIES["timer"]().freeze()
    adapter = DualWeaverAdapter(2, [0, 1], dropout=0.0)
    whole = sum(weight.numel() for weight in backbone.parameters())
    if sharded:
        shard_blocks(backbone)
    adapter.pairs_at_once = 2
    window = torch.randn(4, backbone.context_length + HORIZON, 2, generator=torch.Generator().manual_seed(1))
    loss = adapter.objective(backbone, window, backbone.context_length, HORIZON, None)
    loss.backward()
    here = sum(getattr(weight, "_local_tensor", weight).numel() for weight in backbone.parameters())
    return {"loss": loss.detach(), "gradients": [w.grad for w in adapter.parameters()], "share": here / whole}


def forecast(**settings: Any) -> dict[str, Any]:
    """Of the estimator, fitted by all processes together."""
    model = DualWeaver(
        NormalisedToy(CONTEXT, HORIZON),
        HORIZON,
        context_length=CONTEXT,
        batch_size=2 * BATCH,
        max_epochs=2,
        window_stride=1,
        verbose=False,
        **settings,
    ).fit(waves(200))
    return {"forecast": torch.tensor(model.predict().to_numpy()), "errors": model.scores_["mse"].tolist()}


def main(output: str) -> None:
    torch.set_num_threads(1)
    trainings = {name: trained(name, devices=2, strategy="ddp") for name in ("reconstruction", "paper")}
    found = {"trained": trainings, "sharded": gradients(sharded=True), "fitted": forecast(devices=2)}
    torch.save(found, f"{output}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
