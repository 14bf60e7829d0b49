"""Parts that are computed again: the same bits, less memory, and the cheapest set of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_backbones import FACTORIES, series
from torch import Tensor

from dualweaver.adapters import DualWeaverAdapter, FineTune
from dualweaver.backbones import Backbone
from dualweaver.backbones.timer import TimerBackbone, TimerConfig, TimerForPrediction
from dualweaver.compute.recompute import part_names, recomputing
from dualweaver.errors import SettingError
from dualweaver.planning.choice import choose_parts, frontier, smallest_parts
from dualweaver.planning.memory import record_memory
from dualweaver.planning.parts import Call, Inventory, Kept, take_inventory

pytestmark = pytest.mark.usefixtures("one_thread")


def frozen(name: str) -> Backbone:
    torch.manual_seed(0)
    return FACTORIES[name]().freeze()


def forecast_error(backbone: Backbone, horizon: int) -> Callable[[Tensor], Tensor]:
    return lambda context: backbone(context, horizon).square().sum()


def own_loss(backbone: Backbone) -> Callable[[Tensor], Tensor]:
    """Its own loss, from labels that are part of what it is given."""
    future = backbone.label_horizon(backbone.native_horizon)

    def loss(window: Tensor) -> Tensor:
        context, labels = window[:, :-future], window[:, backbone.label_start(window.shape[1] - future) :]
        draws = torch.Generator().manual_seed(0)
        return backbone.loss(context, labels, horizon=backbone.native_horizon, generator=draws).sum()

    return loss


def inventory_of(name: str, *, native: bool) -> tuple[Backbone, Callable[[Tensor], Tensor], Tensor, Inventory]:
    backbone = frozen(name)
    extra = backbone.label_horizon(backbone.native_horizon) if native else 0
    function = own_loss(backbone) if native else forecast_error(backbone, 2 * backbone.native_horizon)
    x = series(backbone, extra=extra).requires_grad_()
    return backbone, function, x, take_inventory(backbone, function, [x])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["timer", "sundial", "ttm", "fracast", "module"])
def test_every_set_of_the_frontier_gives_the_bits_of_the_plain_run(name: str, native: bool) -> None:
    backbone, function, x, inventory = inventory_of(name, native=native)
    value = function(x)
    (gradient,) = torch.autograd.grad(value, x)
    for choice in frontier(inventory, levels=5):
        with recomputing(backbone, choice.parts):
            again = function(x)
            assert torch.equal(again, value), choice
            assert torch.equal(torch.autograd.grad(again, x)[0], gradient), choice


@pytest.mark.parametrize("name", ["timer", "sundial"])
def test_each_part_alone_and_all_together_give_the_bits_of_the_plain_run(name: str) -> None:
    backbone, function, x, _ = inventory_of(name, native=True)
    (gradient,) = torch.autograd.grad(function(x), x)
    parts = part_names(backbone)
    assert {part.rpartition(".")[2] for part in parts} >= {"forward", "sublayers", "attend", "feed", "mix", "gated"}
    for chosen in [*([part] for part in parts), parts]:
        with recomputing(backbone, chosen):
            assert torch.equal(torch.autograd.grad(function(x), x)[0], gradient), chosen


def test_a_training_step_keeps_its_bits_under_dropout_of_the_fusion() -> None:
    backbone = frozen("timer")
    window = torch.randn(3, backbone.context_length + 8, 2)
    results = []
    for parts in ([], [part for part in part_names(backbone) if part.endswith(".forward")]):
        torch.manual_seed(0)
        adapter = DualWeaverAdapter(2, [0, 1], dropout=0.5)
        with recomputing(backbone, parts):
            loss = adapter.objective(backbone, window, backbone.context_length, 8, None)
            loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in adapter.parameters())])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_fine_tuning_draws_the_same_dropout_again() -> None:
    results = []
    for parts in ("", "forward", "attend"):
        backbone = frozen("sundial")
        adapter = FineTune(2, [0, 1])
        window = torch.randn(
            2, backbone.context_length + backbone.label_horizon(8), 2, generator=torch.Generator().manual_seed(1)
        )
        chosen = [part for part in part_names(backbone) if parts and part.endswith(f".{parts}")]
        with backbone.unfrozen(), recomputing(backbone, chosen):
            backbone.train()
            torch.manual_seed(2)
            loss = adapter.objective(backbone, window, backbone.context_length, 8, None)
            loss.backward()
            gradients = [weight.grad for weight in backbone.parameters() if weight.grad is not None]
            results.append([loss.detach(), *gradients])
            assert len(gradients) > 20
            torch.manual_seed(3)
            with torch.no_grad():  # dropout is there: other draws, another loss
                other = adapter.objective(backbone, window, backbone.context_length, 8, None)
            assert not torch.equal(other, loss)
    for plain, *again in zip(*results, strict=True):
        assert all(torch.equal(plain, other) for other in again)


def test_a_cached_rollout_is_not_extended_twice() -> None:
    """Blocks are given a cache there: they are kept whatever is asked for."""
    backbone = frozen("timer")
    x = series(backbone).requires_grad_()
    function = forecast_error(backbone, 3 * backbone.native_horizon)
    (gradient,) = torch.autograd.grad(function(x), x)
    with recomputing(backbone, [part for part in part_names(backbone) if part.endswith((".forward", ".attend"))]):
        assert torch.equal(torch.autograd.grad(function(x), x)[0], gradient)


def test_a_part_that_is_not_there_is_refused_by_name() -> None:
    with (
        pytest.raises(SettingError, match=r"recompute='model.nowhere' is no part .* model.model.layers.0.feed"),
        recomputing(frozen("timer"), ["model.nowhere"]),
    ):
        pass


def test_nothing_is_left_behind() -> None:
    backbone = frozen("timer")
    before = copy.deepcopy({path: set(module.__dict__) for path, module in backbone.named_modules()})
    with recomputing(backbone, part_names(backbone)):
        pass
    assert before == {path: set(module.__dict__) for path, module in backbone.named_modules()}


def live_at_most(function: Callable[[Tensor], Tensor], x: Tensor, backbone: Backbone) -> int:
    run = record_memory(lambda: torch.autograd.grad(function(x), x), backbone, (), {}, "cpu")
    return run.peak


def test_memory_falls_by_what_the_inventory_says() -> None:
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = TimerConfig(input_token_len=8, output_token_lens=(8,), **small)
    backbone = TimerBackbone(TimerForPrediction(config), context_length=128)
    function, x = own_loss(backbone), torch.randn(16, 136).requires_grad_()
    inventory = take_inventory(backbone, function, [x])
    plain = live_at_most(function, x, backbone)
    assert inventory.kept() <= plain <= 1.2 * inventory.kept()
    choices = frontier(inventory, levels=5)
    assert choices[-1].peak < 0.4 * inventory.kept()
    for choice in choices[1:]:
        with recomputing(backbone, choice.parts):
            saved = plain - live_at_most(function, x, backbone)
        assert saved == pytest.approx(inventory.peak() - choice.peak, abs=0.06 * plain), choice


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    """Up to seven parts, some inside of others, and storages that several of them keep or need."""
    count = draw(st.integers(1, 7))
    calls: list[Call] = []
    for position in range(count):
        outer = draw(st.sampled_from([None, *range(position)]))
        within = frozenset() if outer is None else calls[outer].within | {outer}
        part = f"part {draw(st.integers(0, position))}" if outer is None else f"part {position}"
        if outer is None and any(call.part == part and call.within for call in calls):
            part = f"part {position}"
        calls.append(
            Call(
                part,
                within,
                draw(st.integers(position, 12)),
                draw(st.floats(0.01, 5)),
                draw(st.integers(0, 60)),
            )
        )
    chains = st.sampled_from([frozenset(), *(call.within | {at} for at, call in enumerate(calls))])
    storages = draw(
        st.lists(
            st.builds(
                Kept,
                st.integers(1, 100),
                st.frozensets(chains, max_size=3),
                st.frozensets(st.integers(0, count - 1), max_size=2),
                st.integers(0, 12),
            ),
            min_size=1,
            max_size=8,
        )
    )
    return Inventory(calls, storages)


def sensible(inventory: Inventory) -> list[tuple[str, ...]]:
    """All sets of parts of which none lies inside of another one."""
    parts = list(inventory.seconds)
    clashes = {(inventory.calls[outer].part, call.part) for call in inventory.calls for outer in call.within}
    return [
        chosen
        for size in range(len(parts) + 1)
        for chosen in itertools.combinations(parts, size)
        if not any(outer in chosen and inner in chosen and outer != inner for outer, inner in clashes)
    ]


@settings(max_examples=60, deadline=None)
@given(inventories(), st.floats(0, 1))
def test_the_programme_finds_what_trying_all_sets_finds(inventory: Inventory, position: float) -> None:
    tried = {chosen: inventory.peak(chosen) for chosen in sensible(inventory)}
    least = min(tried.values())
    assert smallest_parts(inventory).peak == least
    budget = least + position * (tried[()] - least)
    best = min(sum(inventory.seconds[part] for part in chosen) for chosen, peak in tried.items() if peak <= budget)
    found = choose_parts(inventory, budget)
    assert found.peak == inventory.peak(found.parts) <= budget
    assert found.seconds == pytest.approx(best, rel=6e-3)


def test_a_budget_below_the_least_is_refused_with_the_least() -> None:
    inventory = Inventory([Call("a", frozenset(), 1, 1.0, 5)], [Kept(1000, frozenset([frozenset()]), frozenset(), 1)])
    with pytest.raises(SettingError, match=r"the least is 0\.001 MB"):
        choose_parts(inventory, 10)


def test_frozen_models_that_compute_nothing_again_run_as_before() -> None:
    """No checkpoint is entered: autograd's graph is the one without parts."""
    backbone = frozen("timer")
    x = series(backbone).requires_grad_()
    plain = backbone(x).sum()
    kinds, nodes = set(), [plain.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            kinds.add(type(node).__name__)
            nodes += [following for following, _ in node.next_functions]
    assert not any("Checkpoint" in kind for kind in kinds)
