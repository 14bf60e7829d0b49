"""How strongly channels act on each other inside the adapter."""

from __future__ import annotations

import pytest
import torch
from staged import CONTEXT, HORIZON, fitted, frame
from torch import nn
from toy_backbones import NormalisedToy

from dualweaver.errors import DataError, SettingError
from dualweaver.method import CNNFusion, ContextFilter, MLPFusion, Weaver
from dualweaver.method.influence import channel_influence, spread_contexts

pytestmark = pytest.mark.usefixtures("one_thread")


def contexts(channels: int) -> torch.Tensor:
    return torch.randn(3, 10, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_it_is_the_jacobian_of_a_point_wise_fusion():
    torch.manual_seed(0)
    fusion = MLPFusion(4, 2).double().eval()
    nn.init.normal_(fusion.fc2.weight)
    x = contexts(4)
    exact = torch.stack([torch.autograd.functional.jacobian(fusion, row) for row in x.flatten(0, 1)])
    found = channel_influence(Weaver(fusion, [0, 2]).double(), x)
    torch.testing.assert_close(found, exact.square().mean(dim=0).sqrt())


@pytest.mark.parametrize("filtered", [False, True])
def test_it_estimates_the_jacobian_of_what_looks_around(filtered: bool):
    torch.manual_seed(0)
    fusion = CNNFusion(3).double().eval()
    nn.init.normal_(fusion.fc.weight)
    edit = ContextFilter(3, range(3)).double().eval() if filtered else None
    if edit is not None:
        nn.init.normal_(edit.write.weight)
    weaver = Weaver(fusion, range(3), edit).double()
    x = contexts(3)

    def woven(window: torch.Tensor) -> torch.Tensor:
        return fusion(window[None])[0] + (0 if edit is None else edit(window[None])[0])

    exact = torch.stack([torch.autograd.functional.jacobian(woven, window) for window in x])
    expected = exact.square().sum(dim=3).mean(dim=(0, 1)).sqrt()  # over the steps of a channel
    found = torch.stack([channel_influence(weaver, x, seed=seed) for seed in range(40)]).square().mean(dim=0).sqrt()
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0)


def test_users_read_it_by_the_names_of_their_columns():
    model = fitted(NormalisedToy(CONTEXT, HORIZON), targets=["a", "b"], learning_rate=0.03)
    model.pipeline_.fallback[:] = [False, True]
    influence = model.channel_influence(frame())
    assert list(influence.index) == ["a", "b"]
    assert list(influence.columns) == ["a", "b", "c"]
    assert (influence.loc["a"] > 0).all()
    assert (influence.loc["b"] == 0).all()  # zero-shot forecasts it
    assert influence.equals(model.channel_influence(frame()))
    assert model.channel_influence().shape == (2, 3)


def test_it_says_where_there_is_none():
    with pytest.raises(SettingError, match="only 'dualweaver'"):
        fitted(NormalisedToy(CONTEXT, HORIZON), adapter="zero-shot").channel_influence()
    model = fitted(NormalisedToy(CONTEXT, HORIZON))
    with pytest.raises(DataError, match=f"no entity has {CONTEXT} rows"):
        model.channel_influence(frame(CONTEXT - 1))


def test_contexts_are_spread_from_the_first_row_to_the_last():
    values = torch.arange(20.0).reshape(20, 1).numpy()
    assert [part[0, 0] for part in spread_contexts(values, 5, 4)] == [0, 5, 10, 15]
    assert [part[0, 0] for part in spread_contexts(values, 5, 1)] == [15]
    assert len(spread_contexts(values, 20, 9)) == 1
    assert spread_contexts(values, 21, 9) == []
