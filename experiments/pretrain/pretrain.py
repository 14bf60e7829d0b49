"""Pretrain Loom on synthetic series, with the forecasts of another model as part of the target.

    python experiments/pretrain/pretrain.py --teacher ttm:path/to/weights --minutes 25
    python experiments/pretrain/pretrain.py --teacher ttm:path/to/weights --minutes 25      goes on where it stopped

A pool of series is renewed all the time, so that each one is seen about four times. The middle level learns a mixture
of what came and of what the teacher forecasts, by squared error; the other levels learn what came, by pinball loss
around the middle one. What is kept is a running mean of the weights. Everything is written to `--out`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from synthetic import draw_series
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dualweaver.backbones import Backbone, load_backbone
from dualweaver.backbones.loom.model import LoomConfig, LoomModel, save_loom, standardise

CONTEXT, HORIZON = 512, 96
FRESH, REUSE = 1024, 4
LIMIT = 8.0  # deviations of the context; what lies beyond teaches nothing but to be afraid


class Pool:
    """Series with the teacher's forecasts, renewed a part at a time."""

    def __init__(self, teacher: Backbone, size: int, seed: int) -> None:
        self.teacher, self.rng, self.next = teacher, np.random.default_rng(seed), 0
        self.series, self.taught = torch.empty(size, CONTEXT + HORIZON), torch.empty(size, HORIZON)
        for _ in range(size // FRESH):
            self.renew()

    def renew(self) -> None:
        fresh = torch.from_numpy(draw_series(FRESH, CONTEXT + HORIZON, self.rng))
        rows = slice(self.next, self.next + FRESH)
        self.series[rows] = fresh
        self.taught[rows] = self.teacher.forecast(fresh[:, :CONTEXT]).mean
        self.next = (self.next + FRESH) % len(self.series)

    def draw(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Context, future and the teacher's forecast; short contexts now and then."""
        rows = torch.from_numpy(self.rng.integers(0, len(self.series), count))
        length = int(self.rng.integers(32, CONTEXT)) if self.rng.random() < 0.15 else CONTEXT
        series = self.series[rows]
        return series[:, CONTEXT - length : CONTEXT], series[:, CONTEXT:], self.taught[rows]


def losses(model: LoomModel, context: Tensor, future: Tensor, taught: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Squared error of the middle level and pinball loss of the others, in deviations of the context."""
    moving = context.std(dim=1) > 0.02  # where the series stood still, what followed is all there is to its size
    context, future, taught = context[moving], future[moving], taught[moving]
    observed = context.shape[1]
    scaled, mean, scale = standardise(context)
    scaled = torch.nn.functional.pad(scaled, (CONTEXT - observed, 0))
    future, taught = (((part - mean) / scale).clamp(-LIMIT, LIMIT) for part in (future, taught))
    point, offsets = model.parts(scaled, observed)
    point, offsets = point.float(), offsets.float()
    squared = (point[..., 0] - (share * taught + (1 - share) * future)).square().mean()
    half = offsets.shape[-1] // 2
    steps = [-offsets[..., :half].cumsum(-1).flip(-1), offsets[..., half:].cumsum(-1)]
    error = (future[..., None] - point.detach()) - torch.cat(steps, dim=-1)
    levels = torch.tensor([level for level in model.config.quantiles if level != 0.5])
    return squared, torch.maximum(levels * error, (levels - 1) * error).mean()


def save(out: Path, model: LoomModel, mean: AveragedModel, optimiser: torch.optim.Optimizer, told: dict) -> None:
    """A checkpoint written aside, then renamed; the running mean as a directory that `loom:directory` loads."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"mean.{name}": value for name, value in mean.module.state_dict().items()}
    for index, state in optimiser.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
    save_file(tensors, out / "state.part", metadata={"told": json.dumps(told)})
    os.replace(out / "state.part", out / "state.safetensors")
    save_loom(mean.module, out / "loom")


def resume(out: Path, model: LoomModel, mean: AveragedModel, optimiser: torch.optim.Optimizer) -> dict:
    """Put a checkpoint back; says how far it had come."""
    file = out / "state.safetensors"
    if not file.exists():
        return {"step": 0, "seconds": 0.0}
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["told"])
    tensors = load_file(file)
    for prefix, module in (("model.", model), ("mean.", mean.module)):
        module.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
    mean.n_averaged.fill_(1)
    return told


def curve(log: Path, picture: Path) -> None:
    """Both losses against the minutes."""
    rows, figure = pd.read_csv(log), Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(rows["seconds"] / 60, rows["squared"], label="squared error of the middle level")
    axes.plot(rows["seconds"] / 60, rows["pinball"], label="pinball loss of the others")
    axes.set(xlabel="minutes on one thread", ylabel="mean of 100 steps", yscale="log")
    axes.legend()
    figure.savefig(picture)


def main(arguments: list[str] | None = None) -> None:
    """Train until the minutes are over; an earlier state in `--out` goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="as load_backbone takes it")
    parser.add_argument("--out", type=Path, default=Path("runs/loom"))
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--steps", type=int, help="stop after so many, if the minutes are not over before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--share", type=float, default=0.75, help="of the teacher in the target of the middle level")
    parser.add_argument("--pool", type=int, default=32768, help=f"series held, a multiple of {FRESH}")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)

    model = LoomModel(LoomConfig(context_length=CONTEXT, horizon=HORIZON))
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.998))
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.02)
    told = resume(options.out, model, mean, optimiser)
    pool = Pool(load_backbone(options.teacher), options.pool, options.seed + told["step"])
    log = options.out / "log.csv"
    if told["step"]:  # what came after the checkpoint is done again
        rows = pd.read_csv(log, dtype=str)
        rows[rows["step"].astype(int) <= told["step"]].to_csv(log, index=False)
    total, before, started = options.minutes * 60, told["seconds"], time.perf_counter()
    sums, counted, saved = torch.zeros(2), 0, 0.0
    with log.open("a", newline="") as file:
        writer = csv.writer(file)
        if not told["step"]:
            writer.writerow(["step", "seconds", "rate", "squared", "pinball"])
        while (seconds := before + time.perf_counter() - started) < total and told["step"] != options.steps:
            step = told["step"] = told["step"] + 1
            rate = options.rate * min(step / 200, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * seconds / total)))
            optimiser.param_groups[0]["lr"] = rate
            if step % (REUSE * FRESH // options.batch) == 0:
                pool.renew()
            with torch.autocast("cpu", torch.bfloat16):
                squared, pinball = losses(model, *pool.draw(options.batch), options.share)
            optimiser.zero_grad()
            (squared + pinball).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            mean.update_parameters(model)
            sums, counted = sums + torch.stack([squared, pinball]).detach(), counted + 1
            if step % 100 == 0:
                writer.writerow(
                    [step, f"{seconds:.0f}", f"{rate:.2e}", *(f"{value / counted:.4f}" for value in sums.tolist())]
                )
                file.flush()
                sums, counted = torch.zeros(2), 0
            if seconds - saved > 60:
                told["seconds"], saved = seconds, seconds
                save(options.out, model, mean, optimiser, told)
    told["seconds"] = seconds
    save(options.out, model, mean, optimiser, told)
    curve(log, options.out / "loss.png")


if __name__ == "__main__":
    main()
