"""What follows from the method's formulas, tried on many inputs."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from toy_backbones import LinearToy, NormalisedToy

from dualweaver.adapters import DualWeaverAdapter
from dualweaver.backbones import Backbone
from dualweaver.method import CNNFusion, MLPFusion, Weaver, fusion_width, surrogate_bound
from dualweaver.method.weaver import SCALE_FLOOR

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT, HORIZON = 12, 4

seeds = st.integers(0, 2**31 - 1)
fusions = st.sampled_from(["mlp", "cnn"])
scales = st.floats(SCALE_FLOOR, 10.0)
quick = settings(max_examples=25, deadline=None)


def assert_equal(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_adapter(
    seed: int,
    channels: int,
    targets: list[int],
    fusion: str,
    *,
    objective: str = "reconstruction",
    dropout: float = 0.5,
) -> DualWeaverAdapter:
    """Any a, b > 0 and any F, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapter = DualWeaverAdapter(channels, targets, fusion=fusion, objective=objective, dropout=dropout).double()
        for weights in adapter.weaver.fusion.parameters():
            nn.init.normal_(weights, std=0.5)
        for scale in (adapter.weaver.a, adapter.weaver.b):
            nn.init.uniform_(scale, SCALE_FLOOR, 3.0)
    return adapter.eval()


@st.composite
def problems(draw_one: st.DrawFn) -> tuple[int, int, list[int]]:
    """A seed, the channels of a window, and those to forecast, in any order."""
    channels = draw_one(st.integers(1, 6))
    targets = draw_one(st.lists(st.integers(0, channels - 1), min_size=1, unique=True))
    return draw_one(seeds), channels, targets


@quick
@given(problem=problems(), fusion=fusions, training=st.booleans())
def test_a_linear_affine_equivariant_backbone_is_reconstructed_exactly_whatever_the_fusion(
    problem: tuple[int, int, list[int]], fusion: str, training: bool
) -> None:
    seed, channels, targets = problem
    backbone, x = LinearToy(CONTEXT, HORIZON, seed=seed), draw(seed, 3, CONTEXT, channels)
    adapter = random_adapter(seed, channels, targets, fusion).train(training)
    untouched = backbone(x[..., targets].transpose(1, 2).flatten(0, 1)).view(3, -1, HORIZON).transpose(1, 2)
    assert_equal(adapter(backbone, x, HORIZON), untouched)


@quick
@given(seed=seeds, fusion=fusions)
def test_the_fusion_cancels_in_training_under_every_dropout_mask(seed: int, fusion: str) -> None:
    adapter = random_adapter(seed, 3, [0, 1, 2], fusion).train()
    x = draw(seed, 5, CONTEXT, 3)
    first, second = adapter.weaver.surrogates(x)
    assert not torch.allclose(first, adapter.weaver.surrogates(x)[0])  # another mask at every call
    assert_equal(adapter.weaver.reconstruct(first, second), x)
    copies = LinearToy(CONTEXT, HORIZON, copies=True)
    assert_equal(adapter(copies, x, HORIZON), x[:, -HORIZON:])


@quick
@given(seed=seeds, a=scales, b=scales, kind=st.sampled_from(["squared", "absolute"]))
def test_the_bound_holds_for_the_error_of_the_reconstruction(
    seed: int, a: float, b: float, kind: Literal["squared", "absolute"]
) -> None:
    weaver = Weaver(nn.Identity(), range(2)).double()
    nn.init.constant_(weaver.a, a)
    nn.init.constant_(weaver.b, b)
    truth, spoilt = draw(seed, 6, HORIZON, 2), draw(seed + 1, 2, 6, HORIZON, 2)
    labels = weaver.surrogates(truth)
    first, second = (label + error for label, error in zip(labels, spoilt, strict=True))
    error = weaver.reconstruct(first, second) - truth
    measure = torch.square if kind == "squared" else torch.abs
    losses = [measure(wrong).mean(dim=1) for wrong in spoilt]
    bound = surrogate_bound(losses[0], losses[1], weaver.a + weaver.b, kind)
    assert (measure(error).mean(dim=1) <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("kind", ["squared", "absolute"])
def test_the_bound_is_reached_where_both_surrogates_err_alike_in_opposite_directions(
    kind: Literal["squared", "absolute"],
) -> None:
    error = torch.tensor([2.0])
    loss = error.square() if kind == "squared" else error
    scale = torch.tensor([4.0])
    reconstruction = (error - -error) / scale
    expected = reconstruction.square() if kind == "squared" else reconstruction
    torch.testing.assert_close(surrogate_bound(loss, loss, scale, kind), expected)


@quick
@given(problem=problems(), fusion=fusions)
def test_the_untrained_forecast_is_the_flip_average(problem: tuple[int, int, list[int]], fusion: str) -> None:
    seed, channels, targets = problem
    backbone, x = NormalisedToy(CONTEXT, HORIZON).double(), draw(seed, 3, CONTEXT, channels)
    adapter = DualWeaverAdapter(channels, targets, fusion=fusion).double().eval()
    series = x[..., targets].transpose(1, 2).flatten(0, 1)
    average = (backbone(series) - backbone(-series)) / 2
    expected = average.view(3, -1, HORIZON).transpose(1, 2)
    assert_equal(adapter(backbone, x, HORIZON), expected)
    assert not torch.allclose(average, backbone(series))  # not zero-shot: the model is not odd


@quick
@given(seed=seeds, fusion=fusions, order=st.permutations(range(4)))
def test_permuting_channels_and_weights_permutes_the_forecast(seed: int, fusion: str, order: list[int]) -> None:
    adapter, backbone = random_adapter(seed, 4, [0, 1, 2, 3], fusion), NormalisedToy(CONTEXT, HORIZON).double()
    permuted = random_adapter(seed, 4, [0, 1, 2, 3], fusion)
    ours, theirs = permuted.weaver, adapter.weaver
    with torch.no_grad():
        ours.a.copy_(theirs.a[order])
        ours.b.copy_(theirs.b[order])
        if isinstance(ours.fusion, MLPFusion) and isinstance(theirs.fusion, MLPFusion):
            ours.fusion.fc1.weight.copy_(theirs.fusion.fc1.weight[:, order])
            last, other = ours.fusion.fc2, theirs.fusion.fc2
        else:
            assert isinstance(ours.fusion, CNNFusion)
            assert isinstance(theirs.fusion, CNNFusion)
            ours.fusion.conv1.weight.copy_(theirs.fusion.conv1.weight[:, order])
            last, other = ours.fusion.fc, theirs.fusion.fc
        last.weight.copy_(other.weight[order])
        last.bias.copy_(other.bias[order])
    x = draw(seed, 3, CONTEXT, 4)
    assert_equal(permuted(backbone, x[..., order], HORIZON), adapter(backbone, x, HORIZON)[..., order])


@quick
@given(seed=seeds, factor=st.floats(0.1, 10.0), shift=st.floats(-10.0, 10.0))
def test_an_untrained_forecast_moves_and_stretches_with_the_data(seed: int, factor: float, shift: float) -> None:
    """Where the backbone does: one that normalises each window by its own mean and deviation."""
    adapter, backbone = DualWeaverAdapter(2, [0, 1]).double().eval(), NormalisedToy(CONTEXT, HORIZON).double()
    x = draw(seed, 3, CONTEXT, 2)
    expected = adapter(backbone, x, HORIZON) * factor + shift
    torch.testing.assert_close(adapter(backbone, x * factor + shift, HORIZON), expected, rtol=1e-6, atol=1e-6)


@quick
@given(seed=seeds, shift=st.floats(-10.0, 10.0))
def test_a_constant_that_the_fusion_adds_to_a_series_changes_nothing(seed: int, shift: float) -> None:
    adapter, backbone = random_adapter(seed, 3, [0, 2], "mlp"), NormalisedToy(CONTEXT, HORIZON).double()
    x, fusion = draw(seed, 3, CONTEXT, 3), adapter.weaver.fusion
    before = adapter(backbone, x, HORIZON)
    assert isinstance(fusion, MLPFusion)
    with torch.no_grad():
        fusion.fc2.bias.add_(shift)
    torch.testing.assert_close(adapter(backbone, x, HORIZON), before, rtol=1e-6, atol=1e-6)


@quick
@given(problem=problems(), fusion=fusions, objective=st.sampled_from(["reconstruction", "paper"]))
def test_gradients_never_reach_the_backbone(problem: tuple[int, int, list[int]], fusion: str, objective: str) -> None:
    seed, channels, targets = problem
    adapter = random_adapter(seed, channels, targets, fusion, objective=objective).train()
    backbone: Backbone = NormalisedToy(CONTEXT, HORIZON).double()
    backbone.train()  # as Lightning does with all that it holds
    window = draw(seed, 3, CONTEXT + HORIZON, channels)
    reference = adapter.reference_loss(backbone, window, CONTEXT, HORIZON)
    adapter.objective(backbone, window, CONTEXT, HORIZON, reference).backward()
    assert all(weights.grad is None for weights in backbone.parameters())
    assert all(scale.grad is not None for scale in (adapter.weaver.a, adapter.weaver.b))
    series = adapter.encode(window[:, :CONTEXT]).detach()
    torch.testing.assert_close(backbone(series), backbone(series), rtol=0, atol=0)  # its dropout stayed off


@quick
@given(seed=seeds, rate=st.floats(0.1, 1e6))
def test_scales_stay_positive_under_gradients_of_any_size(seed: int, rate: float) -> None:
    weaver = random_adapter(seed, 3, [0, 1, 2], "mlp").weaver
    optimizer = torch.optim.SGD([weaver.a, weaver.b], lr=rate)
    weaver.a.grad, weaver.b.grad = draw(seed, 3) * 1e6, draw(seed + 1, 3) * 1e6
    optimizer.step()
    weaver.project()
    assert (weaver.a >= SCALE_FLOOR).all()
    assert (weaver.b >= SCALE_FLOOR).all()


@quick
@given(seed=seeds, targets=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), a=scales, b=scales)
def test_quantiles_are_sorted_and_scale_with_the_surrogates(seed: int, targets: list[int], a: float, b: float) -> None:
    weaver = Weaver(nn.Identity(), targets).double()
    nn.init.constant_(weaver.a, a)
    nn.init.constant_(weaver.b, b)
    first, second = draw(seed, 2, 2, HORIZON, len(targets), 5).sort(dim=-1).values
    quantiles = weaver.reconstruct_quantiles(first, second)
    assert (quantiles.diff(dim=-1) >= 0).all()
    assert_equal(quantiles[..., 2], weaver.reconstruct(first[..., 2], second[..., 2]))


@quick
@given(seed=seeds, a=st.floats(0.1, 3.0), b=st.floats(0.1, 3.0))
def test_quantiles_of_opposite_surrogates_pair_in_reverse(seed: int, a: float, b: float) -> None:
    """Y is exponential, skewed on purpose; its surrogates are a*Y + F and -b*Y + F with quantiles known exactly."""
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64)

    def quantile(tau: Tensor) -> Tensor:
        return -torch.log1p(-tau)

    fused = draw(seed, 1)
    weaver = Weaver(nn.Identity(), [0]).double()
    nn.init.constant_(weaver.a, a)
    nn.init.constant_(weaver.b, b)
    first = a * quantile(levels) + fused
    second = -b * quantile(1 - levels) + fused  # the tau-quantile of -Y is minus the (1 - tau)-quantile of Y
    paired = weaver.reconstruct_quantiles(first.view(1, 1, 1, -1), second.view(1, 1, 1, -1)).flatten()
    assert_equal(paired, quantile(levels))
    equal = (first - second) / (a + b)  # the wrong rule is off by a share of the width
    spread = quantile(levels)[-1] - quantile(levels)[0]
    assert_equal((equal - quantile(levels)).abs().max(), b / (a + b) * spread)


@pytest.mark.parametrize(
    ("channels", "width"), [(1, 32), (7, 32), (31, 32), (32, 64), (321, 512), (862, 512), (100, 128)]
)
def test_the_fusion_is_as_wide_as_published(channels: int, width: int) -> None:
    assert fusion_width(channels) == width


@pytest.mark.parametrize("fusion", [MLPFusion(5, 2), CNNFusion(5, 2)])
def test_a_fusion_starts_at_zero(fusion: nn.Module) -> None:
    torch.testing.assert_close(fusion.train()(torch.randn(3, 9, 5)), torch.zeros(3, 9, 2), rtol=0, atol=0)


def test_the_cnn_drops_whole_time_steps_and_sees_four_steps_around() -> None:
    fusion = CNNFusion(3, dropout=0.5).train()
    dropped = fusion.dropout1(torch.ones(2, 50, 3))
    assert (dropped == dropped[..., :1]).all()
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    nn.init.normal_(fusion.fc.weight)
    x = torch.randn(1, 21, 3)
    moved = x.clone()
    moved[:, 10] += 1
    fusion.eval()
    touched = (fusion(x) != fusion(moved)).any(dim=-1).flatten().nonzero().flatten()
    assert (int(touched.min()), int(touched.max())) == (6, 14)
