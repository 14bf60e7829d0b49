"""The filter that edits contexts before they are woven."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy_backbones import NormalisedToy

from dualweaver import DualWeaver
from dualweaver.adapters import DualWeaverAdapter
from dualweaver.method import FILTER_SHARES, ContextFilter, MLPFusion, Weaver
from dualweaver.method.context_filter import FILTER_STEPS

pytestmark = pytest.mark.usefixtures("one_thread")


def filled(channels: int = 3, targets: tuple[int, ...] = (0, 1, 2)) -> ContextFilter:
    """A filter that does something."""
    torch.manual_seed(0)
    made = ContextFilter(channels, targets).double().eval()
    nn.init.normal_(made.write.weight, std=0.1)
    return made


def contexts(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_fresh_filter_leaves_forecasts_as_they_are():
    x, backbone = contexts(4, 12, 3), NormalisedToy(12, 4).double()
    with_filter, without = (DualWeaverAdapter(3, range(3), context_filter=on).double().eval() for on in (True, False))
    assert with_filter.weaver.context_filter is not None
    assert torch.equal(with_filter(backbone, x, 4), without(backbone, x, 4))


def test_forecasts_apply_a_share_of_the_edit_that_training_applies():
    x, edit = contexts(2, 40, 3), filled()
    edit.dropout.p = 0.0
    whole = edit.train()(x)
    edit.eval().strength.fill_(0.25)
    torch.testing.assert_close(edit(x), 0.25 * whole)


def test_a_fit_leaves_the_filter_at_a_share_that_no_cautious_one_beats_on_validation():
    steps = torch.arange(400)[:, None] / 4 + torch.arange(3)
    noise = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    frame = pd.DataFrame((steps.sin() + noise / 3).numpy(), columns=list("abc"))
    frame.index = pd.date_range("2024", periods=400, freq="h")
    fitted = DualWeaver(NormalisedToy(12, 4), 4, context_length=12, max_epochs=3, verbose=False).fit(frame)
    history = fitted.history_.set_index("stage")["val_mse"]
    tried = history[history.index.str.startswith("dualweaver: share ")]
    assert len(tried) == len(FILTER_SHARES)
    assert tried["dualweaver: share 0.5"] == pytest.approx(history["dualweaver"].iloc[-1], rel=1e-6)
    assert isinstance(fitted.pipeline_.adapter, DualWeaverAdapter)
    kept = fitted.pipeline_.adapter.weaver.context_filter
    assert kept is not None
    taken = tried[f"dualweaver: share {float(kept.strength):g}"]
    assert taken <= min(tried["dualweaver: share 0.25"], tried["dualweaver: share 0.5"])
    assert tried.min() < tried.max()
    assert fitted.scores_["mse"].mean() <= taken * (1 + 1e-6)


def test_the_published_objective_has_no_filter():
    assert DualWeaverAdapter(3, range(3), objective="paper").weaver.context_filter is None


@given(shift=st.floats(-100, 100), scale=st.floats(1, 100))
def test_an_edit_moves_and_grows_with_its_channel(shift: float, scale: float):
    x, edit = 10 * contexts(2, 40, 3), filled()
    plain, moved = edit(x), edit(x * scale / 10 + shift)
    # not exactly: a little is added to the spread, so that channels that stand still keep doing so
    torch.testing.assert_close(moved, plain * scale / 10, rtol=0.1, atol=1e-3 * scale)


def test_a_channel_at_rest_is_hardly_edited():
    x = torch.ones(1, 40, 3, dtype=torch.float64)
    assert float(filled()(x).detach().abs().max()) < 0.1


def test_shorter_contexts_use_the_weights_of_the_most_recent_steps():
    x, edit = contexts(2, FILTER_STEPS, 3), filled()
    with torch.no_grad():
        edit.read.weight[:, :-40] = 0
    short = x[:, -40:]
    level = short.mean(dim=1, keepdim=True)
    padded = torch.cat([level.expand(2, FILTER_STEPS - 40, 3), short], dim=1)
    spread = (padded.std(dim=1, correction=0) + 0.05) / (short.std(dim=1, correction=0) + 0.05)
    # the same shape over another spread: what is read scales, and what is written scales back
    with torch.no_grad():
        edit.read.bias.zero_()
        edit.read.weight.mul_(1e-4)  # where SiLU is close to linear
    torch.testing.assert_close(edit(short), edit(padded)[:, -40:], rtol=1e-2, atol=1e-7)
    assert float(spread.max()) < 0.5


def test_steps_before_the_most_recent_ones_are_not_edited():
    edit = filled()(contexts(2, FILTER_STEPS + 30, 3))
    assert not edit[:, :30].any()
    assert edit[:, 30:].any()


def test_other_columns_reach_a_target_once_mixing_has_learned():
    x, edit = contexts(2, 40, 3), filled(targets=(2,))
    other = x.clone()
    other[..., 0] *= 3
    assert torch.equal(edit(x), edit(other))  # at first each target reads itself
    with torch.no_grad():
        edit.mix.weight.fill_(0.5)
    moved = x.clone()
    moved[:, :20, 0] += 2
    assert not torch.allclose(edit(x), edit(moved))


def test_extreme_values_of_a_channel_give_finite_edits():
    x = contexts(2, 40, 3).float()
    x[0, 5, 0] = 3e38
    assert torch.isfinite(filled().float()(x)).all()


def test_what_fusion_adds_still_cancels_for_a_linear_model():
    x, linear = contexts(3, 24, 3), torch.randn(24, 4, dtype=torch.float64)
    fusion = MLPFusion(3).double().eval()
    nn.init.normal_(fusion.fc2.weight)
    weaver = Weaver(fusion, range(3), filled()).double().eval()
    with torch.no_grad():
        weaver.a.uniform_(0.5, 2)
        weaver.b.uniform_(0.5, 2)
    first, second = ((s.transpose(1, 2) @ linear).transpose(1, 2) for s in weaver.context_surrogates(x))
    assert weaver.context_filter is not None
    edited = x + weaver.context_filter(x)
    torch.testing.assert_close(weaver.reconstruct(first, second), (edited.transpose(1, 2) @ linear).transpose(1, 2))
