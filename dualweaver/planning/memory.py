"""Who holds memory while something runs: every allocation that torch makes, and what it was for.

`torch.profiler` tells each allocation by address and time. Saved-tensor hooks and notes in the same trace tell what an
address holds, so that nothing is estimated and nothing is counted twice.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from dualweaver.compute.recompute import is_recomputed, watching

__all__ = ["GRADIENTS", "OUTSIDE", "WORKSPACE", "Holdings", "record_memory", "resident_bytes", "storage_bytes"]

_NOTE = "dualweaver|"
WORKSPACE, GRADIENTS, OUTSIDE = "workspace", "weight gradients", "outside of blocks"


@dataclass(frozen=True)
class Holdings:
    """Bytes over time by what holds them.

    Attributes:
        seconds: moments at which something changed, from the start.
        held: by holder, one value a moment; constant ones included.
    """

    seconds: list[float]
    held: dict[str, list[int]]

    @property
    def totals(self) -> list[int]:
        return [sum(moment) for moment in zip(*self.held.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.totals)

    def at_peak(self) -> dict[str, int]:
        """What the peak is made of."""
        totals = self.totals
        moment = totals.index(max(totals))
        return {holder: values[moment] for holder, values in self.held.items()}


def record_memory(
    run: Callable[[], object], model: nn.Module, trained: Iterable[Tensor], constant: dict[str, int], device: str
) -> Holdings:
    """Run something once and see what its memory holds.

    Args:
        run: allocates gradients of `trained` anew.
        model: whose parts tell blocks apart: what a part keeps for a backward pass is held by its module.
        trained: weights whose gradients are told apart.
        constant: bytes that are there before and after.
        device: where memory is looked at, "cpu" or "cuda".
    """
    trained = list(trained)
    shared = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *trained)}
    names = {id(module): path or type(module).__name__ for path, module in model.named_modules()}
    open_blocks: list[str] = []

    def note(tensor: Tensor, holder: str) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address not in shared:
            with record_function(f"{_NOTE}{address}|{holder}"):
                pass

    def keep(tensor: Tensor) -> Tensor:
        note(tensor, open_blocks[0] if open_blocks else OUTSIDE)
        return tensor

    @contextmanager
    def watch(module: nn.Module, method: str, args: tuple[Any, ...]) -> Iterator[None]:
        open_blocks.append(names[id(module)])
        try:
            if is_recomputed(module, method):
                for arg in args:
                    if isinstance(arg, Tensor):
                        note(arg, open_blocks[0])
            yield
        finally:
            open_blocks.pop()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with _silenced(), profile(activities=activities, profile_memory=True) as recorded:
        with watching(watch), hooks:
            run()
        for weight in trained:
            if weight.grad is not None:
                note(weight.grad, GRADIENTS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return _holdings(events, constant, 1 if device == "cuda" else 0)


@contextmanager
def _silenced() -> Iterator[None]:
    """Without what the profiler's library writes to the standard error each time that it starts and stops."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    sys.stderr.flush()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@dataclass
class _Span:
    """One allocation; `holder` from the moment `known` on."""

    size: int
    start: float
    end: float = float("inf")
    holder: str = WORKSPACE
    known: float = float("inf")


def _holdings(events: list[dict[str, Any]], constant: dict[str, int], device_type: int) -> Holdings:
    wanted = [event for event in events if event.get("name") == "[memory]" or str(event.get("name")).startswith(_NOTE)]
    alive: dict[int, _Span] = {}
    spans: list[_Span] = []
    for event in sorted(wanted, key=lambda event: event["ts"]):
        if event["name"] == "[memory]":
            args = event["args"]
            if args["Device Type"] != device_type:
                continue
            if args["Bytes"] > 0:
                alive[args["Addr"]] = span = _Span(args["Bytes"], event["ts"])
                spans.append(span)
            elif (freed := alive.pop(args["Addr"], None)) is not None:
                freed.end = event["ts"]
            continue
        address, holder = event["name"].removeprefix(_NOTE).split("|")
        noted = alive.get(int(address))
        if noted is not None and holder == GRADIENTS:  # known at the end only, but they have been that all the time
            noted.holder, noted.known = holder, noted.start
        elif noted is not None and noted.holder == WORKSPACE:
            noted.holder, noted.known = holder, event["ts"]
    return _over_time(spans, constant)


def _over_time(spans: list[_Span], constant: dict[str, int]) -> Holdings:
    changes: list[tuple[float, str, int]] = []
    for span in spans:
        changes.append((span.start, WORKSPACE, span.size))
        if span.known < span.end:
            changes += [(span.known, WORKSPACE, -span.size), (span.known, span.holder, span.size)]
            changes.append((span.end, span.holder, -span.size))
        else:
            changes.append((span.end, WORKSPACE, -span.size))
    changes = sorted(change for change in changes if change[0] < float("inf"))
    holders = [
        GRADIENTS,
        *sorted({holder for _, holder, _ in changes} - {WORKSPACE, GRADIENTS}, key=_natural),
        WORKSPACE,
    ]
    now = dict.fromkeys(holders, 0)
    start = changes[0][0] if changes else 0.0
    moments, seconds = [dict(now)], [0.0]
    for at, holder, size in changes:
        now[holder] += size
        when = (at - start) / 1e6
        if when == seconds[-1] and len(seconds) > 1:
            moments[-1] = dict(now)
        else:
            seconds.append(when)
            moments.append(dict(now))
    held = {name: [size] * len(seconds) for name, size in constant.items()}
    return Holdings(seconds, held | {holder: [moment[holder] for moment in moments] for holder in holders})


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages, each once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def resident_bytes(which: str = "VmRSS") -> int | None:
    """What the system says of this process, "VmRSS" now or "VmHWM" at most; None where it does not say."""
    try:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status[which].split()[0]) * 1024
    except (OSError, KeyError):
        return None
