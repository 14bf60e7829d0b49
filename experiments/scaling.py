"""What `dualweaver.planning` promises, measured: profiles, recomputation, predictions, plans, and a very wide table.

    python experiments/scaling.py run                  every claim; table beside this file, pictures in docs
    python experiments/scaling.py run --only plans     those whose name contains a word
    python experiments/scaling.py run --quick          the same on toy sizes in seconds, nothing is written

Weights are random, of the published size: time and memory do not depend on them. Times are processor times of one
thread, medians of interleaved runs. Memory is what torch allocates (weights, gradients, optimizer state, activations,
workspace), without the table; profiles are also held against what the system counts in a process of its own.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import published
import speed
import torch
import typer

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone, load_backbone
from dualweaver.backbones.recompute import recomputing
from dualweaver.backbones.sundial import SundialBackbone, SundialConfig, SundialForPrediction
from dualweaver.planning.choice import choose_parts, smallest_parts
from dualweaver.planning.costs import Costs, InnerProbe, probe_costs
from dualweaver.planning.memory import record_memory, resident_bytes, storage_bytes
from dualweaver.planning.parts import take_inventory
from dualweaver.planning.planner import Plan, choose_plan, plans_for
from dualweaver.planning.profiling import profile
from dualweaver.planning.search import plan_training, probe_shape
from dualweaver.planning.step import Shape, TrainingStep
from dualweaver.precision import precision_of

HERE = Path(__file__).parent
HORIZON = 96
ROUNDS = 3

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@dataclass(frozen=True)
class Row:
    """One claim: a ratio that may be at most, or has to be at least, so much."""

    trial: str
    claim: str
    wanted: str
    measured: float
    holds: bool
    detail: str = ""


def at_most(trial: str, claim: str, measured: float, limit: float, detail: str = "") -> Row:
    return Row(trial, claim, f"<= {limit:g}", measured, measured <= limit, detail)


def at_least(trial: str, claim: str, measured: float, limit: float, detail: str = "") -> Row:
    return Row(trial, claim, f">= {limit:g}", measured, measured >= limit, detail)


def sundial(quick: bool) -> Backbone:
    torch.manual_seed(0)
    small = {**speed.DECODER, "output_token_lens": (96,), "num_sampling_steps": 4} if quick else {}
    return SundialBackbone(SundialForPrediction(SundialConfig(**small)))


def adapter_for(channels: int, objective: str = "reconstruction") -> DualWeaverAdapter:
    torch.manual_seed(1)
    return DualWeaverAdapter(channels, range(channels), objective=objective)


# Profiles


PROFILES = [("timer", 672, 7, 4), ("timer", 2880, 7, 4), ("ttm", 512, 7, 32)]


def profiles(quick: bool) -> list[Row]:
    """Each in a process of its own, which gives freed memory back, so that the system's count is of this one alone."""
    rows = []
    for name, context, channels, batch in PROFILES[:1] if quick else PROFILES:
        if quick:
            found = numbers_of_profile(name, context, channels, batch, "", quick=True)
        else:
            picture = HERE.parent / "docs" / f"profile-{name}-{context}.png"
            sizes = [name, str(context), str(channels), str(batch), str(picture)]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            command = [sys.executable, __file__, "profiled", *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
        phases = ", ".join(f"{phase} {share:.1%}" for phase, share in found["phases"].items())
        rows.append(
            at_most(
                f"profile of {name}, C={channels}, B={batch}, context {context}",
                "parts of the peak against what the system counts, relative difference",
                abs(found["parts"] / found["system"] - 1),
                float("inf") if quick else 0.1,
                f"{found['parts'] / 1e6:.1f} MB of parts, {found['system'] / 1e6:.1f} MB counted; {phases}; "
                f"{found['windows']:.3g} windows/s, {found['share']:.0%} of the rate of products",
            )
        )
    return rows


def numbers_of_profile(
    name: str, context: int, channels: int, batch: int, picture: str, *, quick: bool
) -> dict[str, Any]:
    backbone = speed.ttm(quick) if name == "ttm" else speed.timer(quick, context)
    found = profile(backbone, channels=channels, batch_size=batch, context_length=context)
    if picture:
        found.plot().savefig(picture, dpi=110)
    return {
        "parts": sum(found.holdings.at_peak().values()),
        "system": found.resident,
        "phases": {phase: seconds / found.step_seconds for phase, seconds in found.seconds.items()},
        "windows": found.windows_per_second,
        "share": found.share,
    }


@app.command(hidden=True)
def profiled(name: str, context: int, channels: int, batch: int, picture: str) -> None:
    """One profile, as a line of JSON."""
    torch.set_num_threads(1)
    print(json.dumps(numbers_of_profile(name, context, channels, batch, picture, quick=False)))


# Recomputation


def recomputation(quick: bool) -> list[Row]:
    """Of four pairs of surrogates through the frozen Timer, its own loss, forward and backward."""
    context = 480 if quick else 2880
    backbone = speed.timer(quick, context)
    probe = InnerProbe(adapter_for(1, "paper"), backbone, 8, context, HORIZON)
    inventory = take_inventory(backbone, probe.loss, [probe.context], clock=time.process_time)
    plain, gradient = record(probe, backbone), probe()
    value = probe.loss(probe.context)
    rows = []
    for factor, asked, most in ((1.9, 1.98, 1.2), (3.1, 3.35, 1.5)):  # while parts run again there is workspace too
        choice = choose_parts(inventory, max(inventory.peak() / asked, smallest_parts(inventory).peak))
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(1 if quick else 2 * ROUNDS):
            for again in (False, True):
                with recomputing(backbone, choice.parts) if again else nullcontext():
                    times[again].append(seconds_of(probe))
        with recomputing(backbone, choice.parts):
            same = torch.equal(probe(), gradient) and torch.equal(probe.loss(probe.context), value)
            peak = record(probe, backbone)
        ratio = statistics.median(b / a for a, b in zip(times[False], times[True], strict=True))
        trial = f"recomputation, Timer, context {context}, {factor:g} times smaller"
        expected = 1 + choice.seconds / statistics.median(times[False])
        detail = f"expected {expected:.3f}; {len(choice.parts)} parts"
        # apart from the gradients and other workspace that both runs have
        kept = inventory.peak() / (peak - (plain - inventory.peak()))
        rows += [
            at_least(
                trial, "activations counted, times smaller", inventory.peak() / choice.peak, 1 if quick else factor
            ),
            at_least(trial, "activations measured, times smaller", kept, 1 if quick else factor),
            at_most(trial, "time of forward and backward, ratio", ratio, float("inf") if quick else most, detail),
            at_least(trial, "loss and gradient have equal bits", float(same), 1),
            at_least(trial, "the same with workspace, times smaller", plain / peak, 1),
        ]
    return rows


def record(run: Callable[[], object], backbone: Backbone) -> int:
    return record_memory(run, backbone, (), {}, "cpu").peak


def seconds_of(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


# Predictions


@dataclass(frozen=True)
class Family:
    """One backbone and objective: probes to fit on, and shapes (context, channels, batch, rows) that are not among."""

    name: str
    backbone: Callable[[], Backbone]
    objective: str
    pieces: Sequence[tuple[int, int]]
    windows: Sequence[tuple[int, int, int]]
    shapes: Sequence[tuple[int, int, int, int]]


def families(quick: bool) -> list[Family]:
    timer = Family(
        "Timer 84M",
        lambda: speed.timer(quick, 2880),
        "reconstruction",
        [(2, 672), (8, 672), (2, 1440), (2, 2880), (8, 2880), (16, 1440)],
        [(1, 7, 672), (4, 7, 672), (1, 7, 2880), (2, 21, 1440), (1, 40, 672), (1, 64, 2880)],
        [(960, 3, 8, 12), (1920, 5, 4, 5), (2400, 12, 2, 8), (1152, 40, 1, 10)],
    )
    ttm = Family(
        "TTM R2",
        lambda: speed.ttm(quick),
        "reconstruction",
        [(8, 512), (64, 512), (192, 512), (384, 512)],
        [(1, 7, 512), (8, 7, 512), (32, 7, 512), (2, 40, 512), (4, 132, 512)],
        [(512, 3, 32, 96), (512, 21, 8, 84), (512, 60, 4, 120)],
    )
    others = [
        Family(
            "Fracast-0",
            lambda: load_backbone("fracast"),
            "reconstruction",
            [(2, 128), (16, 128), (2, 512), (16, 512)],
            [(1, 7, 128), (4, 7, 128), (1, 7, 512), (4, 7, 512), (2, 21, 512)],
            [(256, 7, 4, 14), (384, 12, 2, 8)],
        ),
        Family(
            "Sundial 128M, its own loss",
            lambda: sundial(quick),
            "paper",
            [(2, 480), (8, 480), (2, 960), (6, 960)],
            [(1, 3, 480), (4, 3, 480), (1, 7, 960), (2, 7, 960)],
            [(720, 3, 2, 3)],
        ),
    ]
    return [timer] if quick else [timer, ttm, *others]


def predictions(quick: bool) -> list[Row]:
    rows = []
    for family in families(quick):
        backbone = family.backbone()
        costs = probe_costs(
            lambda channels, objective=family.objective: adapter_for(channels, objective),  # type: ignore[misc]
            backbone,
            HORIZON,
            precision=precision_of(backbone),
            pieces=family.pieces[:4] if quick else family.pieces,
            windows=family.windows[:3] if quick else family.windows,
            clock=time.process_time,
        )
        for context, channels, batch, pairs in family.shapes[:1] if quick else family.shapes:
            adapter = adapter_for(channels, family.objective)
            shape = Shape(channels, batch, context, HORIZON)
            peak, seconds = measured(adapter, backbone, shape, batch, pairs)
            rows += compared(
                f"{family.name}, context {context}, C={channels}, B={batch}, {pairs} pairs at once",
                costs,
                adapter,
                shape,
                pairs,
                peak,
                seconds,
                quick,
            )
        print(f"{family.name} done", file=sys.stderr, flush=True)
    return rows


def compared(
    name: str,
    costs: Costs,
    adapter: DualWeaverAdapter,
    shape: Shape,
    pairs: int,
    peak: float,
    seconds: float,
    quick: bool,
) -> list[Row]:
    bytes_, expected = (
        costs.bytes(adapter, shape, shape.batch_size, pairs),
        costs.seconds(adapter, shape, shape.batch_size, pairs),
    )
    return [
        at_most(
            name,
            "predicted peak, relative error",
            abs(bytes_ / peak - 1),
            float("inf") if quick else 0.1,
            f"{bytes_ / 1e6:.1f} MB for {peak / 1e6:.1f}",
        ),
        at_most(
            name,
            "predicted time, relative error",
            abs(expected / seconds - 1),
            float("inf") if quick else 0.2,
            f"{expected:.3f} s for {seconds:.3f}",
        ),
    ]


def measured(
    adapter: DualWeaverAdapter, backbone: Backbone, shape: Shape, windows: int, pairs: int | None
) -> tuple[float, float]:
    """Peak and time of a step of the optimizer."""
    adapter.pairs_at_once = pairs
    step = TrainingStep(adapter, backbone, shape, micro_batch=windows)
    step()
    times = []
    for _ in range(ROUNDS):
        step.forget_gradients()
        times.append(seconds_of(step))
    return peak_of(step), statistics.median(times)


def peak_of(step: TrainingStep) -> float:
    """Of one step, weights and optimizer included, the table not."""
    step.forget_gradients()
    weights = [*step.backbone.parameters(), *step.backbone.buffers(), *step.adapter.parameters()]
    state = [part for entry in step.optimizer.state.values() for part in entry.values()]
    constant = {"weights": storage_bytes(weights), "optimizer state": storage_bytes(state)}
    return record_memory(step, step.backbone, step.trained, constant, "cpu").peak


# Plans


def naive_step(backbone: Any, shape: Shape, windows: int, *, theirs: bool) -> Callable[[], None]:
    """What is done without a planner: float32, everything that a micro-batch needs kept at once.

    `theirs` is the published procedure (its loss of the untouched model computed at every step, fusion evaluated four
    times, dense masks, PyTorch's products); else it is our objective with all pairs in one piece.
    """
    adapter = adapter_for(shape.channels, "paper")
    adapter.pairs_at_once = shape.channels * windows
    step = TrainingStep(adapter, backbone, shape, micro_batch=windows)
    if not theirs:
        return step
    loss = lambda context, labels: published.timer_loss(backbone.model, context, labels)  # noqa: E731
    table = step.data.train_windows.__getitems__(range(shape.batch_size))

    def run() -> None:
        for part in table.split(windows):
            value = published.training_loss(adapter.weaver, loss, part, shape.context_length, backbone.patch)
            (value / step.accumulate).backward()
        step.optimizer.step()

    return run


def naive(backbone: Any, shape: Shape, *, theirs: bool) -> dict[int, tuple[float, Callable[[], None]]]:
    """Peak and step of every micro-batch that a user comes by who halves it until it fits."""
    weights = storage_bytes([*backbone.parameters(), *backbone.buffers()])
    found, windows = {}, shape.batch_size
    while windows:
        run = naive_step(backbone, shape, windows, theirs=theirs)
        run()
        found[windows] = weights + record(run, backbone), run
        windows //= 2
    return found


def plans(quick: bool) -> list[Row]:
    """Three budgets for Timer at context 2880, seven channels, four windows a step.

    They are such that one, two or all four windows fit without a planner.
    """
    context = 480 if quick else 2880
    backbone = speed.timer(quick, context)
    half = copy.deepcopy(backbone).to(torch.bfloat16)
    shape, adapter = Shape(7, 4, context, HORIZON), adapter_for(7, "paper")
    costs = [probe_shape(one, adapter, shape, time.process_time) for one in (backbone, half)]
    rivals = {
        "published procedure": naive(backbone, shape, theirs=True),
        "our objective": naive(backbone, shape, theirs=False),
    }
    rows = []
    for windows in (1, 2, 4):
        budget = 1.05 * rivals["our objective"][windows][0]
        name = f"budget of {budget / 1e6:.0f} MB, Timer, context {context}, C=7, 4 windows"
        found, peaks = {}, {}
        for label, known in (("float32", costs[:1]), ("precision left to the plan", costs)):
            choices = [one for cost in known for one in plans_for(cost, adapter, shape)]
            chosen = found[label] = choose_plan(choices, budget, known, adapter, shape)
            own = half if chosen.precision == "bf16" else backbone
            with chosen.applied(adapter, own):
                peaks[label] = peak_of(TrainingStep(adapter, own, shape, micro_batch=chosen.micro_batch))
        largest = {
            rival: max((count for count, (peak, _) in steps.items() if peak <= budget), default=None)
            for rival, steps in rivals.items()
        }
        runs: dict[str, Callable[[], object]] = {
            label: planned_step(chosen, half if chosen.precision == "bf16" else backbone, shape)
            for label, chosen in found.items()
        }
        runs |= {rival: rivals[rival][count][1] for rival, count in largest.items() if count}
        times: dict[str, list[float]] = {label: [] for label in runs}
        for _ in range(1 if quick else ROUNDS):
            for label, run in runs.items():
                times[label].append(seconds_of(run))
        for label, chosen in found.items():
            text = f"{label}: peak against the budget"
            rows.append(at_most(name, text, peaks[label] / budget, 1, describe(chosen)))
            for rival, count in largest.items():
                if count is None:
                    text = f"{label}: against {rival}: not even one window fits there"
                    rows.append(at_least(name, text, float("inf"), 1.28))
                    continue
                ratio = statistics.median(b / a for a, b in zip(times[label], times[rival], strict=True))
                text = f"{label}: times as fast as {rival}, micro-batch lowered to {count}"
                wanted = 0 if quick or (label == "float32" and rival == "our objective") else 1.28
                rows.append(at_least(name, text, ratio, wanted))
        print(f"{name} done", file=sys.stderr, flush=True)
    return rows


def planned_step(chosen: Plan, backbone: Backbone, shape: Shape) -> Callable[[], object]:
    adapter = adapter_for(shape.channels, "paper")
    step = TrainingStep(adapter, backbone, shape, micro_batch=chosen.micro_batch)

    def run() -> None:
        with chosen.applied(adapter, backbone):
            step()
        step.forget_gradients()

    run()  # the untouched model's losses are known from the second look at a window on
    return run


def describe(chosen: Plan) -> str:
    return (
        f"{chosen.accumulate} x {chosen.micro_batch} windows, {chosen.rows} pairs at once, "
        f"{len(chosen.recompute)} parts computed again, {chosen.precision}"
    )


# A very wide table


def wide(quick: bool) -> list[Row]:
    """862 channels, as many as there are sensors in the traffic benchmark, at context 2880."""
    channels, context, batch = (40, 480, 2) if quick else (862, 2880, 1)
    budget = 6e9
    backbone = speed.timer(quick, context)
    shape = Shape(channels, batch, context, HORIZON)
    chosen = plan_training([backbone], adapter_for(channels), shape, budget).chosen
    window, losses, forecasts = speed.windows(1, context, channels), [], []
    largest = 0
    for planned in (True, False):
        adapter = adapter_for(channels)
        with chosen.applied(adapter, backbone) if planned else nullcontext():
            step = TrainingStep(adapter, backbone, shape, micro_batch=chosen.micro_batch)
            losses.append([float(step()) for _ in range(2)])
            step.forget_gradients()
            adapter.eval()
            with torch.no_grad():
                forecasts.append(adapter(backbone, window, HORIZON))
        if planned:
            largest = resident_bytes("VmHWM") or 0
            with torch.no_grad():
                forecasts.append(adapter(backbone, window, HORIZON))  # the same weights, all series at once
        print(f"{channels} channels, {'with' if planned else 'without'} a plan: {losses[-1]}", file=sys.stderr)
    planned_ones, same, plain = forecasts
    deviation = float(plain.std())
    name = f"{channels} channels, Timer, context {context}, budget of 6 GB, two steps and a forecast"
    return [
        at_most(
            name, "the whole process, libraries included, against the budget", largest / budget, 1, describe(chosen)
        ),
        at_most(name, "expected peak against the budget", chosen.bytes / budget, 1),
        at_most(
            name,
            "forecasts of the same weights with and without a budget, largest difference in deviations",
            float((planned_ones - same).abs().max()) / deviation,
            1e-4,
        ),
        at_most(
            name,
            "forecasts after training with and without a budget, root mean square difference in deviations",
            float((planned_ones - plain).square().mean().sqrt()) / deviation,
            1e-2,
            "losses " + ", ".join(f"{one:.6g} and {other:.6g}" for one, other in zip(*losses, strict=True)),
        ),
    ]


TRIALS = {
    "profiles": profiles,
    "recomputation": recomputation,
    "predictions": predictions,
    "plans": plans,
    "wide": wide,
}


def to_markdown(rows: Sequence[Row], heading: str) -> str:
    lines = [heading, "", "| measured | claim | wanted | found | holds | |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.trial} | {row.claim} | {row.wanted} | {row.measured:.3f} | "
        f"{'yes' if row.holds else 'no'} | {row.detail} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


@app.command()
def run(
    quick: Annotated[bool, typer.Option(help="toy sizes, nothing is written")] = False,
    only: Annotated[str, typer.Option(help="trials whose name contains it")] = "",
) -> None:
    """Measure the claims."""
    torch.set_num_threads(1)
    rows = []
    for name in TRIALS:
        if only in name:
            start = time.perf_counter()
            found = TRIALS[name](quick)
            rows += found
            print(to_markdown(found, f"{name}: {time.perf_counter() - start:.0f} s"), flush=True)
    if not quick and not only:
        heading = f"# Memory and time within a budget\n\nOne thread, torch {torch.__version__}."
        (HERE / "scaling.md").write_text(to_markdown(rows, heading))


if __name__ == "__main__":
    app()
