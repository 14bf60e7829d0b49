"""What a forward pass keeps for its backward pass, part by part, and what it takes to compute a part again.

Autograd keeps storages; several operations may keep the same one. A storage is gone only if every operation that keeps
it lies in a part that is computed again, and a part that is computed again needs its arguments. `Inventory` holds just
that, so that the memory under any set of parts can be told without running it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dualweaver.compute.recompute import watching

__all__ = ["Call", "Inventory", "Kept", "take_inventory"]


@dataclass
class Call:
    """One call of a part.

    Attributes:
        part: its name.
        within: positions of the calls that it is part of.
        end: how many storages had been kept when it returned.
        seconds: until the last thing that its backward pass needs was there.
        inside: bytes that appear when it is computed again.
    """

    part: str
    within: frozenset[int]
    end: int = 0
    seconds: float = 0.0
    inside: int = 0


@dataclass(frozen=True)
class Kept:
    """A storage.

    Attributes:
        size: bytes.
        holders: for every operation that keeps it, the calls (by position) which that operation is part of.
        needed: calls that have it as an argument.
        since: how many storages had been kept when it was first kept or needed.
    """

    size: int
    holders: frozenset[frozenset[int]]
    needed: frozenset[int]
    since: int


@dataclass(frozen=True)
class Inventory:
    """Calls in the order in which they began, and storages."""

    calls: Sequence[Call]
    storages: Sequence[Kept]

    @property
    def seconds(self) -> dict[str, float]:
        """Time to compute each part again, all its calls together."""
        found: dict[str, float] = {}
        for call in self.calls:
            found[call.part] = found.get(call.part, 0.0) + call.seconds
        return found

    def kept(self, recomputed: Collection[str] = ()) -> int:
        """Bytes kept at the end of the forward pass."""
        return sum(storage.size for storage in self._remaining(recomputed))

    def peak(self, recomputed: Collection[str] = ()) -> int:
        """The most bytes at once: at the end of the forward pass, or while a part is computed again."""
        remaining = list(self._remaining(recomputed))
        moments = [sum(storage.size for storage in remaining)]
        for call in self.calls:
            if call.part in recomputed:
                moments.append(sum(part.size for part in remaining if part.since <= call.end) + call.inside)
        return max(moments)

    def _remaining(self, recomputed: Collection[str]) -> Iterator[Kept]:
        again = {position for position, call in enumerate(self.calls) if call.part in recomputed}
        for storage in self.storages:
            if storage.needed & again or any(not calls & again for calls in storage.holders):
                yield storage


@dataclass
class _Observed:
    """A storage while it is looked at; the tensor keeps its address from being used again."""

    alive: Tensor
    holders: set[frozenset[int]] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    since: int | None = None


class _Observer:
    def __init__(self, model: nn.Module, shared: Sequence[Tensor], clock: Callable[[], float]) -> None:
        self.names = {id(module): path for path, module in model.named_modules()}
        self.shared = {tensor.untyped_storage().data_ptr() for tensor in shared}
        self.device = shared[0].device if shared else torch.device("cpu")
        self.clock = clock
        self.calls: list[Call] = []
        self.open: list[int] = []
        self.begun: dict[int, float] = {}
        self.seen: dict[int, _Observed] = {}
        self.count = 0

    @contextmanager
    def watch(self, module: nn.Module, method: str, args: tuple[Any, ...]) -> Iterator[None]:
        position = len(self.calls)
        name = f"{self.names[id(module)]}.{method}".lstrip(".")
        self.calls.append(Call(name, frozenset(self.open)))
        for tensor in _tensors(args):
            if (found := self._find(tensor)) is not None:
                found.needed.add(position)
                found.since = self.count if found.since is None else found.since
        self.open.append(position)
        self.begun[position] = self._clock()
        try:
            yield
        finally:
            self.open.pop()
            self.calls[position].end = self.count

    def keep(self, tensor: Tensor) -> Tensor:
        found = self._find(tensor)
        if found is not None:
            found.holders.add(frozenset(self.open))
            if found.since is None:
                self.count += 1
                found.since = self.count
        if self.open:
            now = self._clock()
            for position in self.open:
                self.calls[position].seconds = now - self.begun[position]
        return tensor

    def _find(self, tensor: Tensor) -> _Observed | None:
        address = tensor.untyped_storage().data_ptr()
        return None if address in self.shared else self.seen.setdefault(address, _Observed(tensor))

    def _clock(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.clock()

    def inventory(self) -> Inventory:
        kept = [
            Kept(
                seen.alive.untyped_storage().nbytes(), frozenset(seen.holders), frozenset(seen.needed), seen.since or 0
            )
            for seen in self.seen.values()
        ]
        for storage in kept:
            for position in frozenset().union(*storage.holders) - storage.needed:
                self.calls[position].inside += storage.size
        return Inventory(self.calls, kept)


def take_inventory(
    model: nn.Module,
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    shared: Iterable[Tensor] = (),
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> Inventory:
    """Run `function(*tensors)` with gradients and see what it keeps.

    Args:
        model: whose parts are looked at.
        function: that runs it; what it returns is not used.
        tensors: its arguments; those that require gradients do so here.
        shared: storages that are there anyway, apart from the model's weights.
        rounds: how often it is timed; the shortest times count.
        clock: of the timings.
    """
    everywhere = [*shared, *model.parameters(), *model.buffers()]
    with torch.random.fork_rng():
        first = _observed(model, function, tensors, everywhere, clock)
        second = _observed(model, function, tensors, everywhere, clock)
        # what both hold, the first being alive while the second ran, is there anyway: tables that a model keeps
        everywhere += [seen.alive for address, seen in first.seen.items() if address in second.seen]
        del first, second
        found = [_observed(model, function, tensors, everywhere, clock).inventory() for _ in range(rounds)]
    for calls in zip(*(inventory.calls for inventory in found), strict=True):
        calls[0].seconds = min(call.seconds for call in calls)
    _even_out(found[0].calls)
    return found[0]


def _observed(
    model: nn.Module,
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    shared: Sequence[Tensor],
    clock: Callable[[], float],
) -> _Observer:
    observer = _Observer(model, shared, clock)
    given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
    hooks = torch.autograd.graph.saved_tensors_hooks(observer.keep, lambda tensor: tensor)
    with torch.enable_grad(), watching(observer.watch), hooks:
        function(*given)
    return observer


def _even_out(calls: Sequence[Call]) -> None:
    """Blocks of one kind and size take the same time: what a clock says of each is noise."""
    alike: dict[tuple[str, int], list[Call]] = {}
    for call in calls:
        alike.setdefault((call.part.rpartition(".")[2], call.inside), []).append(call)
    for group in alike.values():
        typical = statistics.median(call.seconds for call in group)
        for call in group:
            call.seconds = typical


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)
