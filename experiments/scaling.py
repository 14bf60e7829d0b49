"""What `dualweaver.planning` promises, measured: profiles, recomputation, predictions, plans, and a very wide table.

    python experiments/scaling.py run                  every claim; table beside this file, pictures in docs
    python experiments/scaling.py run --only plans     those whose name contains a word
    python experiments/scaling.py run --quick          the same on toy sizes in seconds, nothing is written

Weights are random, of the published size: time and memory do not depend on them. Times are processor times of one
thread, medians of interleaved runs. Memory is what torch allocates (weights, gradients, optimizer state, activations,
workspace), without the table; profiles are also held against what the system counts in a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import speed
import torch
import typer
from claims import HORIZON, ROUNDS, Row, adapter_for, at_least, at_most, record, seconds_of, to_markdown
from scaling_plans import describe, plans
from scaling_predictions import predictions

from dualweaver.compute.recompute import recomputing
from dualweaver.planning.choice import choose_parts, smallest_parts
from dualweaver.planning.costs import InnerProbe
from dualweaver.planning.memory import resident_bytes
from dualweaver.planning.parts import take_inventory
from dualweaver.planning.profiling import profile
from dualweaver.planning.search import plan_training
from dualweaver.planning.step import Shape, TrainingStep

HERE = Path(__file__).parent

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)

PROFILES = [("timer", 672, 7, 4), ("timer", 2880, 7, 4), ("ttm", 512, 7, 32)]


def profiles(quick: bool) -> list[Row]:
    """Each in a process of its own, so that the system's count is of this one alone."""
    rows = []
    for name, context, channels, batch in PROFILES[:1] if quick else PROFILES:
        if quick:
            found = numbers_of_profile(name, context, channels, batch, "", quick=True)
        else:
            picture = HERE.parent / "docs" / f"profile-{name}-{context}.png"
            sizes = [name, str(context), str(channels), str(batch), str(picture)]
            command = [sys.executable, __file__, "profiled", *sizes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
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


@app.command()
def run(
    quick: Annotated[bool, typer.Option(help="toy sizes, nothing is written")] = False,
    only: Annotated[str, typer.Option(help="trials whose name contains it")] = "",
) -> None:
    """Measure the claims; each trial has its own section in the table."""
    torch.set_num_threads(1)
    for name in TRIALS:
        if only in name:
            start, before = time.perf_counter(), os.getloadavg()[0]
            rows = TRIALS[name](quick)
            load = f"load {before:.1f}-{os.getloadavg()[0]:.1f}"
            heading = f"## {name}\n\n{time.perf_counter() - start:.0f} s, one thread, torch {torch.__version__}, {load}"
            text = to_markdown(rows, heading)
            print(text, flush=True)
            if not quick:
                replace_section(name, text)


def replace_section(name: str, text: str) -> None:
    """Put a trial's section in its place, and leave the others as they are."""
    file = HERE / "scaling.md"
    found = file.read_text().split("\n## ")[1:] if file.exists() else []
    sections = {part.split("\n", 1)[0]: f"## {part.strip()}\n" for part in found} | {name: text}
    parts = ["# Memory and time within a budget\n", *(sections[trial] for trial in TRIALS if trial in sections)]
    file.write_text("\n".join(parts))


if __name__ == "__main__":
    app()
