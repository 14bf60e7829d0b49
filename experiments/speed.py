"""How fast training and forecasting are, as ratios against the published procedure.

    python experiments/speed.py run                 every claim; table, figure and csv beside this file
    python experiments/speed.py run --only timer    those whose name contains a word
    python experiments/speed.py run --quick         the same on toy sizes in seconds, nothing is written

Time to quality is `quality.py`.

The published procedure (`published.py`) runs in float32, recomputes the untouched model's loss at every step, evaluates
the fusion four times, builds dense attention masks, rolls forward without a cache and samples one by one. The floor is
the bare frozen model, once forward and once backward to its input, on the same 2 * batch * channels series. Weights are
random, of the published size: times do not depend on them. Dropout is off, so that losses and gradients can be
compared. The untouched model's loss is known where ours is timed, as it is from the second look at a window on.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import published
import torch
import typer
from stopwatch import Claim, Result, Trial, draw, measure, to_markdown
from torch import Tensor

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone, load_backbone
from dualweaver.backbones.sundial import SundialBackbone, SundialConfig, SundialForPrediction
from dualweaver.backbones.timer import TimerBackbone, TimerConfig, TimerForPrediction
from dualweaver.backbones.ttm import TinyTimeMixerConfig, TinyTimeMixerForPrediction, TTMBackbone
from dualweaver.compute.allocator import keep_freed_memory
from dualweaver.data.module import WindowDataModule
from dualweaver.data.windows import WindowDataset

HERE = Path(__file__).parent
DECODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}  # toy size
HORIZON = 96

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


def timer(quick: bool, context: int, precision: torch.dtype = torch.float32) -> TimerBackbone:
    torch.manual_seed(0)
    config = TimerConfig(**(DECODER if quick else {}))
    return TimerBackbone(TimerForPrediction(config), context_length=context).to(precision)


def ttm(quick: bool) -> Backbone:
    torch.manual_seed(0)
    small = {"d_model": 16, "decoder_d_model": 8} if quick else {}
    return TTMBackbone(TinyTimeMixerForPrediction(TinyTimeMixerConfig(**small))).freeze()


def windows(batch: int, length: int, channels: int) -> Tensor:
    """Random walks, `[batch, length, channel]`."""
    return 0.1 * torch.randn(batch, length, channels, generator=torch.Generator().manual_seed(0)).cumsum(dim=1)


def gradients(adapter: DualWeaverAdapter, loss: Callable[[], Tensor]) -> Tensor:
    """A training step but for the optimizer's part; the loss and the gradients of a and b."""
    adapter.zero_grad()
    value = loss()
    value.backward()
    assert adapter.weaver.a.grad is not None
    assert adapter.weaver.b.grad is not None
    return torch.cat([value.detach()[None], adapter.weaver.a.grad, adapter.weaver.b.grad])


def adapter_for(channels: int, objective: str) -> DualWeaverAdapter:
    torch.manual_seed(1)
    adapter = DualWeaverAdapter(channels, range(channels), objective=objective, dropout=0.0)
    torch.nn.init.normal_(adapter.weaver.fusion.fc2.weight, std=0.05)  # type: ignore[arg-type, union-attr]
    return adapter


def to_input(model: Callable[[Tensor], Tensor], series: Tensor) -> Tensor:
    """Once forward, once backward to the input: the floor."""
    series = series.clone().requires_grad_()
    model(series).sum().backward()
    assert series.grad is not None
    return series.grad


def timer_steps(quick: bool, context: int, batch: int = 4, channels: int = 7) -> Trial:
    single = timer(quick, context)
    half = copy.deepcopy(single).to(torch.bfloat16)
    adapter, default = adapter_for(channels, "paper"), adapter_for(channels, "reconstruction")
    window = windows(batch, context + HORIZON, channels)
    reference = adapter.reference_loss(single, window, context, HORIZON)
    series = window[:, :context].transpose(1, 2).flatten(0, 1).repeat(2, 1)

    def theirs() -> Tensor:
        loss = partial(published.timer_loss, single.model)
        return published.training_loss(adapter.weaver, loss, window, context, single.patch)

    def ours(adapter: DualWeaverAdapter, backbone: Backbone) -> Tensor:
        known = reference if adapter.needs_reference else None
        return gradients(adapter, lambda: adapter.objective(backbone, window, context, HORIZON, known))

    return Trial(
        f"Timer 84M, {channels} channels, {batch} windows, context {context}",
        {
            "published": lambda: gradients(adapter, theirs),
            "ours": lambda: ours(adapter, single),
            "floor": lambda: to_input(single.model.token_predictions, series),
            "ours bf16": lambda: ours(adapter, half),
            "floor bf16": lambda: to_input(lambda x: half.model.token_predictions(x), series),
            "default": lambda: ours(default, single),
        },
        [
            Claim("training step, float32, against the published", "ours", "published", 0.70),
            Claim("training step, float32, against the floor", "ours", "floor", 1.06),
            Claim("training step, bf16, against the published", "ours bf16", "published", 0.42),
            Claim("training step, bf16, against its floor", "ours bf16", "floor bf16", 1.06),
            Claim("the same with our default objective, float32", "default", "published", 0.70),
        ],
        [("ours", "published", 1e-4), ("ours bf16", "published", 3e-2)],
    )


def timer_rollout(quick: bool) -> Trial:
    backbone = timer(quick, 672)
    context = windows(8, 672, 7).transpose(1, 2).flatten(0, 1)
    horizon = 720

    def ours(backbone: TimerBackbone, horizon: int = horizon) -> Tensor:
        with torch.inference_mode():
            return backbone(context, horizon)

    def theirs(horizon: int = horizon) -> Tensor:
        with torch.inference_mode():
            return published.timer_rollout(backbone.model, context, horizon)

    again = copy.copy(backbone)
    again.rollout = "context"
    return Trial(
        f"Timer 84M, forecast of {horizon} steps, {len(context)} series of 672",
        {"published": theirs, "ours": partial(ours, backbone), "the same without cache": partial(ours, again)},
        [Claim("against a rollout without cache", "ours", "published", 0.6)],
        [("the same without cache", "published", 1e-3)],
    )


def sundial_samples(quick: bool) -> Trial:
    torch.manual_seed(0)
    small = {**DECODER, "output_token_lens": (96,), "num_sampling_steps": 4} if quick else {}
    backbone = SundialBackbone(SundialForPrediction(SundialConfig(**small)))
    model = backbone.model
    with torch.no_grad():  # a fresh head changes nothing: give it something to do
        for parameter in model.flow_loss.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    context = windows(1, 160 if quick else 2880, 4).transpose(1, 2).flatten(0, 1)
    noise = torch.randn(100, model.output_length)

    def ours() -> Tensor:
        block = noise.repeat_interleave(len(context), dim=0)
        with torch.inference_mode():
            return backbone.sample(context, model.output_length, len(noise), noise=[block])

    def theirs() -> Tensor:
        with torch.inference_mode():
            return published.sundial_samples(model, context, noise)

    return Trial(
        f"Sundial 128M, 100 samples of {len(context)} series of {context.shape[1]}",
        {"published": theirs, "ours": ours},
        [Claim("against the direct sampler", "ours", "published", 0.4)],
        [("ours", "published", 1e-3)],
    )


def ttm_steps(quick: bool) -> Trial:
    backbone, batch, channels = ttm(quick), 2 if quick else 32, 7
    adapter, window = adapter_for(channels, "reconstruction"), windows(batch, 512 + HORIZON, channels)
    model = backbone.model
    assert isinstance(model, TinyTimeMixerForPrediction)
    plain = partial(published.ttm_forecast, model)

    def theirs() -> Tensor:
        forecast = adapter.decode(plain(adapter.encode(window[:, :512])))
        return torch.nn.functional.mse_loss(forecast, window[:, 512:])

    return Trial(
        f"TTM R2, {channels} channels, {batch} windows ({2 * batch * channels} series)",
        {
            "plain": lambda: gradients(adapter, theirs),
            "ours": lambda: gradients(adapter, lambda: adapter.objective(backbone, window, 512, HORIZON, None)),
        },
        [Claim("training step, against plain eager modules", "ours", "plain", 0.6)],
        [("ours", "plain", 1e-4)],
    )


def fracast_steps(quick: bool) -> Trial:
    from fracast_package import native

    series = windows(2 if quick else 16, 64 if quick else 512, 7).transpose(1, 2).flatten(0, 1)
    backbone = load_backbone("fracast", context_length=series.shape[1])
    return Trial(
        f"Fracast-0, {len(series)} series of {series.shape[1]}",
        {"package": lambda: to_input(native, series), "ours": lambda: to_input(backbone.native, series)},
        [Claim("forward and backward, against the package's modules", "ours", "package", 0.5)],
        [("ours", "package", 1e-2)],
    )


def channels(quick: bool) -> Trial:
    """The batches that a fit makes: 32 windows of 7 channels, 1 window of 862."""
    backbone, wide, batch = ttm(quick), 40 if quick else 862, 4 if quick else 32

    def step(count: int, batch: int) -> Callable[[], Tensor]:
        adapter, window = adapter_for(count, "reconstruction"), windows(batch, 512 + HORIZON, count)
        return lambda: gradients(adapter, lambda: adapter.objective(backbone, window, 512, HORIZON, None))

    return Trial(
        f"TTM R2, {wide} channels (1 window) and 7 ({batch} windows)",
        {"7": step(7, batch), "wide": step(wide, 1)},
        [Claim("training step per channel and window", "wide", "7", 1.1, per=(wide, 7 * batch))],
    )


def data_wait(quick: bool) -> Trial:
    """Beside the fastest backbone."""
    backbone, length = ttm(quick), 512 + HORIZON
    table = windows(1, 17420, 7)[0]
    starts = torch.arange(len(table) - length)
    data = WindowDataModule(
        WindowDataset(table, starts, length), WindowDataset(table, starts[:1], length), stride=8, batch_size=32
    )
    batches: Iterator[tuple[Tensor, Tensor]] = iter(())
    adapter, window = adapter_for(7, "reconstruction"), windows(32, length, 7)

    def fetch() -> None:
        nonlocal batches
        try:
            next(batches)
        except StopIteration:
            batches = iter(data.train_dataloader())
            next(batches)

    def step() -> Tensor:
        return gradients(adapter, lambda: adapter.objective(backbone, window, 512, HORIZON, None))

    claim = Claim("wait for a batch of 32 windows, against a step", "fetch", "step", 0.02)
    return Trial("TTM R2, data", {"fetch": fetch, "step": step}, [claim])


TRIALS: dict[str, Callable[[bool], Trial]] = {
    "timer-672": lambda quick: timer_steps(quick, 672),
    "timer-2880": lambda quick: timer_steps(quick, 2880),
    "timer-rollout": timer_rollout,
    "sundial": sundial_samples,
    "ttm": ttm_steps,
    "fracast": fracast_steps,
    "channels": channels,
    "data": data_wait,
}


def peaks(quick: bool) -> list[Result]:
    """Memory of a process that trains one step at context 2880, weights and libraries included."""
    command = [sys.executable, __file__, "peak", *(["--quick"] if quick else [])]
    variants = ("published", "float32", "bfloat16")[: 2 if quick else 3]
    # at the same time, since no time is measured here
    started = {
        variant: subprocess.Popen([*command, variant], stdout=subprocess.PIPE, text=True) for variant in variants
    }
    found = {variant: float(process.communicate()[0]) for variant, process in started.items()}
    name, their = "Timer 84M, 7 channels, 4 windows, context 2880", found.pop("published")
    return [
        Result(name, f"peak memory of a step in {variant}, GB", 0.6, peak / their, peak / their, peak, their, "-")
        for variant, peak in found.items()
    ]


@app.command(hidden=True)
def peak(variant: str, quick: bool = False) -> None:
    """Two training steps, then the peak of this process in GB."""
    torch.set_num_threads(2)
    backbone, window = timer(quick, 2880), windows(4, 2880 + HORIZON, 7)
    adapter = adapter_for(7, "paper")
    if variant == "bfloat16":
        backbone = backbone.to(torch.bfloat16)
    loss = partial(published.timer_loss, backbone.model)
    for _ in range(2):
        if variant == "published":
            gradients(adapter, lambda: published.training_loss(adapter.weaver, loss, window, 2880, backbone.patch))
        else:
            gradients(adapter, lambda: adapter.objective(backbone, window, 2880, HORIZON, torch.ones(4, 7)))
    # not ru_maxrss: a process inherits that of the one which started it
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 2**20)


def run_trials(quick: bool, only: str = "", rounds: int | None = None) -> list[Result]:
    """The results of all trials whose name contains `only`."""
    results = []
    for name, make in TRIALS.items():
        if only in name:
            trial = make(quick)
            # training keeps freed memory, which spares wide steps most; against others we do without, as they do
            with keep_freed_memory() if name == "channels" else nullcontext():
                results += measure(trial, rounds or (2 if quick else 9))
            if not quick:
                print(to_markdown(results[-len(trial.claims) :], f"{name}:"), flush=True)
    if only in "memory":
        results += peaks(quick)
    return results


@app.command()
def run(
    quick: Annotated[bool, typer.Option(help="toy sizes, nothing is written")] = False,
    only: Annotated[str, typer.Option(help="trials whose name contains it")] = "",
    rounds: Annotated[int | None, typer.Option(help="interleaved runs of every variant")] = None,
    threads: int = 2,
) -> None:
    """Measure the claims."""
    torch.set_num_threads(1 if quick else threads)
    results = run_trials(quick, only, rounds)
    heading = f"# Speed, as ratios against the published procedure\n\n{threads} threads, torch {torch.__version__}."
    text = to_markdown(results, heading)
    print(text)
    if not quick and not only:
        (HERE / "speed.md").write_text(text)
        draw(results, HERE / "speed.png")


if __name__ == "__main__":
    app()
