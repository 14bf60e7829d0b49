"""Time to quality: how long until the published procedure's best validation error is reached.

    python experiments/quality.py ETTh1 --weights path/to/ttm
    python experiments/quality.py ETTh1 --weights path/to/ttm --again    only ours, against the course that is stored
    python experiments/quality.py ETTh1 --weights path/to/ttm --again --no-context-filter

The published procedure trains on every window of the train rows in batches of 32 with its own loss and settings
(AdamW, learning rate 1e-2, cosine over the epochs, patience 3), and forecasts validation and test windows after every
epoch; its time is that until the end of its best epoch. Ours is a whole fit, from arrays to a calibrated
forecaster. Both are scored on the same validation windows afterwards, which is not timed for ours. Times are those of
the processor, so that a machine busy with other work does not flatter either side; the course of the published
procedure, which takes long, is kept in quality.csv.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import benchmark
import pandas as pd
import published
import torch
import typer
from rows import Rows
from torch import Tensor, nn

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import load_backbone
from dualweaver.backbones.ttm import TinyTimeMixerForPrediction
from dualweaver.data.catalogue import describe_dataset, load_dataset
from dualweaver.data.files import write_file
from dualweaver.data.splits import protocol_segments
from dualweaver.data.windows import WindowDataset

STORE = Path(__file__).parent / "quality.csv"
CONTEXT, HORIZON, BATCH = 512, 96, 32
SPLITS = ("train", "validation", "test")


def segments(data: str) -> dict[str, WindowDataset]:
    """All windows of the published split, scaled by the train rows."""
    parts = protocol_segments(load_dataset(data), describe_dataset(data).split, CONTEXT)
    length = CONTEXT + HORIZON
    tables = {name: torch.as_tensor(getattr(parts, name), dtype=torch.float32) for name in SPLITS}
    return {name: WindowDataset(table, torch.arange(len(table) - length + 1), length) for name, table in tables.items()}


@torch.no_grad()
def error(forecast: Callable[[Tensor], Tensor], windows: WindowDataset) -> float:
    """Mean squared error over all windows."""
    total = 0.0
    for chunk in torch.arange(len(windows)).split(BATCH):
        batch = windows.__getitems__(chunk.tolist())
        total += float((forecast(batch[:, :CONTEXT]) - batch[:, CONTEXT:]).square().mean()) * len(chunk)
    return total / len(windows)


def published_course(
    model: TinyTimeMixerForPrediction, data: dict[str, WindowDataset], epochs: int
) -> list[tuple[float, float]]:
    """Seconds since the start and validation error, after each epoch."""
    torch.manual_seed(0)
    channels = data["train"].values.shape[1]
    adapter = DualWeaverAdapter(channels, range(channels), objective="paper")
    forecast = partial(published.ttm_forecast, model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs, eta_min=1e-8)
    start, course = time.process_time(), []

    def loss(context: Tensor, labels: Tensor) -> Tensor:
        return (forecast(context) - labels).square().mean(dim=1, keepdim=True)

    for epoch in range(epochs):
        for rows in torch.randperm(len(data["train"])).split(BATCH):
            window = data["train"].__getitems__(rows.tolist())
            optimizer.zero_grad()
            published.training_loss(adapter.weaver, loss, window, CONTEXT, CONTEXT).backward()
            nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        adapter.eval()
        value = error(lambda x: adapter.decode(forecast(adapter.encode(x))), data["validation"])
        error(lambda x: adapter.decode(forecast(adapter.encode(x))), data["test"])
        adapter.train()
        course.append((time.process_time() - start, value))
        print(f"published, epoch {epoch + 1}: {course[-1][0]:.0f} s, validation MSE {value:.5f}", flush=True)
        if epoch - min(range(len(course)), key=lambda at: course[at][1]) >= 3:
            break
    return course


def kept_course(data: str) -> list[tuple[float, float]]:
    """What `published_course` gave when it was run last."""
    rows = pd.read_csv(STORE)
    rows = rows[rows["data"] == data]
    return list(zip(rows["seconds"], rows["val_mse"], strict=True))


def keep(data: str, course: list[tuple[float, float]]) -> None:
    """Put a course in the store, in place of an earlier one."""
    fresh = pd.DataFrame(course, columns=["seconds", "val_mse"]).round({"seconds": 1})
    fresh.insert(0, "data", data)
    fresh.insert(1, "epoch", range(1, len(course) + 1))
    if STORE.exists():
        rows = pd.read_csv(STORE)
        fresh = pd.concat([rows[rows["data"] != data], fresh])
    write_file(fresh, STORE, index=False)


def main(
    data: str,
    weights: Annotated[str, typer.Option(help="folder of TTM R2")],
    epochs: Annotated[int, typer.Option(help="of the published procedure, at most")] = 10,
    threads: int = 2,
    again: Annotated[bool, typer.Option(help="take the published procedure's course from the store")] = False,
    context_filter: Annotated[bool, typer.Option(help="that of the default; the published method has none")] = True,
) -> None:
    """One data set."""
    torch.set_num_threads(threads)
    parts, backbone = segments(data), load_backbone(f"ttm:{weights}")
    assert isinstance(backbone.model, TinyTimeMixerForPrediction)
    start = time.process_time()
    pipeline = benchmark.fit(Rows(data), f"ttm:{weights}", HORIZON, {"context_filter": context_filter}).pipeline
    ours = time.process_time() - start
    mine = error(lambda x: pipeline.forecast_scaled(x, HORIZON).mean, parts["validation"])
    print(f"ours: {ours:.0f} s, validation MSE {mine:.5f}", flush=True)
    if not again:
        keep(data, published_course(backbone.model, parts, epochs))
    course = kept_course(data)
    seconds, best = min(course, key=lambda point: point[1])
    print(f"{data}: ratio of times {ours / seconds:.3f}; validation MSE {mine:.5f}, published {best:.5f}")


if __name__ == "__main__":
    typer.run(main)
