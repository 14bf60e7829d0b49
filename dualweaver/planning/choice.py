"""Which parts to compute again: the set with the least extra time under a budget, by integer programming.

One binary variable a part, one variable a group of storages that are kept under the same conditions. As in Echo
(arXiv 1805.08899), what a part costs and gives is measured; that it may need an argument which was not kept before, and
that several operations keep one storage, are constraints of the programme. Solved by HiGHS, through scipy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dualweaver.errors import SettingError
from dualweaver.planning.parts import Inventory, Kept

__all__ = ["Choice", "choose_parts", "frontier", "smallest_parts"]

GAP = 5e-3  # relative distance to the optimum at which the solver may stop
SECONDS = 10.0  # after which it takes the best set so far


@dataclass(frozen=True)
class Choice:
    """Parts to compute again, the time that takes, and the most bytes kept at once."""

    parts: tuple[str, ...]
    seconds: float
    peak: int


def choose_parts(inventory: Inventory, budget: float) -> Choice:
    """The set with the least extra time whose `Inventory.peak` is within so many bytes.

    Raises:
        SettingError: no set is; the message says what is the least.
    """
    if inventory.peak() <= budget:
        return Choice((), 0.0, inventory.peak())
    found = _Programme(inventory).solve(budget)
    if found is None:
        least = smallest_parts(inventory)
        raise SettingError(
            f"no choice of parts to compute again keeps within {budget / 1e6:.4g} MB: the least is "
            f"{least.peak / 1e6:.4g} MB"
        )
    return found


def smallest_parts(inventory: Inventory) -> Choice:
    """The set that keeps the fewest bytes at once."""
    found = _Programme(inventory).solve(None)
    assert found is not None  # keeping everything is a solution
    return found


def frontier(inventory: Inventory, levels: int = 8) -> list[Choice]:
    """Best sets from the one that computes nothing again to the one that keeps least, each once."""
    least, plain = smallest_parts(inventory), inventory.peak()
    choices = [choose_parts(inventory, budget) for budget in np.geomspace(plain, max(least.peak, 1), levels)[:-1]]
    # the least bytes at the least time: the set itself was found without regard to time
    choices.append(choose_parts(inventory, least.peak))
    return list({choice.parts: choice for choice in choices}.values())


class _Programme:
    """Variables: x of each part (1: computed again), k of each group of storages (1: kept), z (bytes at once)."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.parts = list(inventory.seconds)
        self.at = {part: position for position, part in enumerate(self.parts)}
        self.unit = max(1, inventory.peak())
        self.groups = _grouped(inventory)
        self.rows: list[tuple[dict[int, float], float]] = []  # coefficients, the least that their sum may be
        for group, (_, storage) in enumerate(self.groups):
            for holders in storage.holders:
                self._at_least({self._k(group): 1.0} | {self._x(call): 1.0 for call in holders}, 1.0)
            for call in storage.needed:
                self._at_least({self._k(group): 1.0, self._x(call): -1.0}, 0.0)
        for position, inner in enumerate(inventory.calls):
            for outer in inner.within:
                if self._x(outer) != self._x(position):
                    self._at_least({self._x(outer): -1.0, self._x(position): -1.0}, -1.0)
        self._moment(None)
        for position in range(len(inventory.calls)):
            self._moment(position)

    def _x(self, call: int) -> int:
        return self.at[self.inventory.calls[call].part]

    def _k(self, group: int) -> int:
        return len(self.parts) + group

    @property
    def _z(self) -> int:
        return len(self.parts) + len(self.groups)

    def _at_least(self, row: dict[int, float], bound: float) -> None:
        self.rows.append((row, bound))

    def _moment(self, call: int | None) -> None:
        """What is there at the end of the forward pass, or while a call is run again, is no more than z.

        A call that is not run again asks for less than the end of the forward pass does.
        """
        end = np.inf if call is None else self.inventory.calls[call].end
        row = {self._z: 1.0}
        for group, (size, storage) in enumerate(self.groups):
            if storage.since <= end:
                row[self._k(group)] = -size / self.unit
        if call is not None:
            row[self._x(call)] = -self.inventory.calls[call].inside / self.unit
        self._at_least(row, 0.0)

    def solve(self, budget: float | None) -> Choice | None:
        """The cheapest set within `budget`; the smallest one where that is None."""
        variables = self._z + 1
        seconds = self.inventory.seconds
        cost = np.zeros(variables)
        if budget is None:
            cost[self._z] = 1.0
        else:
            scale = sum(seconds.values()) or 1.0
            cost[: len(self.parts)] = [max(seconds[part], 1e-9 * scale) / scale for part in self.parts]
        upper = np.ones(variables)
        upper[self._z] = np.inf if budget is None else budget / self.unit
        entries = [(row, column, value) for row, (line, _) in enumerate(self.rows) for column, value in line.items()]
        rows, columns, values = (np.asarray(part) for part in zip(*entries, strict=True))
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), variables)).tocsr()
        found = milp(
            cost,
            integrality=np.r_[np.ones(len(self.parts)), np.zeros(variables - len(self.parts))],
            bounds=Bounds(np.zeros(variables), upper),
            constraints=LinearConstraint(matrix, lb=[bound for _, bound in self.rows]),
            options={"mip_rel_gap": GAP, "time_limit": SECONDS},
        )
        if found.x is None:
            return None
        parts = tuple(part for part, value in zip(self.parts, found.x, strict=False) if value > 0.5)
        return Choice(parts, sum(seconds[part] for part in parts), self.inventory.peak(parts))


def _grouped(inventory: Inventory) -> list[tuple[int, Kept]]:
    """Storages that are kept under the same conditions at the same moments, and their bytes together."""
    ends = sorted({call.end for call in inventory.calls})
    groups: dict[tuple[object, ...], tuple[int, Kept]] = {}
    for storage in inventory.storages:
        if storage.holders or storage.needed:
            moment = int(np.searchsorted(ends, storage.since))
            key = (storage.holders, storage.needed, moment)
            size, first = groups.get(key, (0, storage))
            groups[key] = (size + storage.size, first)
    return list(groups.values())
