"""Interleaved timings of variants that should give the same, and the claims about their ratios."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from torch import Tensor

__all__ = ["Claim", "Result", "Trial", "draw", "measure", "to_markdown"]


@dataclass(frozen=True)
class Claim:
    """One variant takes at most so much of another one's time, `per` being the work of both (equal by default)."""

    text: str
    variant: str
    against: str
    at_most: float
    per: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class Trial:
    """What is timed in turn.

    Attributes:
        name: with all sizes.
        variants: what is timed; each returns what it computed.
        claims: about the ratios of their times.
        agreements: pairs that must give the same up to a share of the largest value.
    """

    name: str
    variants: dict[str, Callable[[], Tensor | None]]
    claims: Sequence[Claim]
    agreements: Sequence[tuple[str, str, float]] = ()


@dataclass(frozen=True)
class Result:
    """One claim and what was measured: medians over rounds, ratios round by round."""

    trial: str
    claim: str
    at_most: float
    ratio: float
    ratio_cpu: float
    seconds: float
    against_seconds: float
    load: str

    @property
    def holds(self) -> bool:
        return self.ratio <= self.at_most


def measure(trial: Trial, rounds: int) -> list[Result]:
    """Time the variants in turn, after one turn that is not counted and whose results are compared.

    Wall time and processor time of the process; the latter is what is left where other programs take the processor.
    """
    outputs = {name: run() for name, run in trial.variants.items()}
    for first, second, tolerance in trial.agreements:
        ours, theirs = outputs[first], outputs[second]
        assert ours is not None
        assert theirs is not None
        apart = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        if not apart <= tolerance:
            raise AssertionError(f"{trial.name}: {first} and {second} are {apart:.2g} apart, more than {tolerance:g}")
    wall: dict[str, list[float]] = {name: [] for name in trial.variants}
    cpu: dict[str, list[float]] = {name: [] for name in trial.variants}
    before = os.getloadavg()[0]
    for _ in range(rounds):
        for name, run in trial.variants.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start)
            cpu[name].append(time.process_time() - start_cpu)
    load = f"{before:.1f}-{os.getloadavg()[0]:.1f}"
    return [
        Result(
            trial.name,
            claim.text,
            claim.at_most,
            _ratio(wall, claim),
            _ratio(cpu, claim),
            statistics.median(wall[claim.variant]),
            statistics.median(wall[claim.against]),
            load,
        )
        for claim in trial.claims
    ]


def _ratio(times: dict[str, list[float]], claim: Claim) -> float:
    pairs = zip(times[claim.variant], times[claim.against], strict=True)
    return statistics.median(mine / other for mine, other in pairs) * claim.per[1] / claim.per[0]


def to_markdown(results: Sequence[Result], heading: str) -> str:
    """A table, one row a claim."""
    lines = [
        heading,
        "",
        "| measured | claim | at most | ratio (wall) | ratio (processor time) | holds | seconds | against | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        lines.append(
            f"| {row.trial} | {row.claim} | {row.at_most:g} | {row.ratio:.3f} | {row.ratio_cpu:.3f} | "
            f"{'yes' if row.holds else 'no'} | {row.seconds:.4g} | {row.against_seconds:.4g} | {row.load} |"
        )
    return "\n".join(lines) + "\n"


def draw(results: Sequence[Result], path: Path) -> None:
    """One bar a claim, relative to what it may be."""
    table = pd.DataFrame([{"label": f"{row.trial}: {row.claim}", "share": row.ratio / row.at_most} for row in results])
    figure, axes = plt.subplots(figsize=(11, 0.36 * len(table) + 1.2), layout="constrained")
    colours = ["#2a7f62" if share <= 1 else "#b5442e" for share in table["share"]]
    axes.barh(table["label"], table["share"], color=colours)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("measured ratio / what it may be at most")
    axes.tick_params(axis="y", labelsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
