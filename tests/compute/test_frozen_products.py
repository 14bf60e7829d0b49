"""Fast paths of frozen models against plain autograd: the same numbers and gradients, and none where weights train."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dualweaver.backbones import load_backbone
from dualweaver.backbones.ttm import TinyTimeMixerConfig, TinyTimeMixerForPrediction, TTMBackbone
from dualweaver.backbones.ttm import frozen as ttm_frozen
from dualweaver.compute.products import Linear
from dualweaver.fit.effort import forward_cost


def gradient(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=x.dtype).view_as(output)
    (output * weights).sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 16), (0, 16)], ids=str)
def test_a_frozen_product_equals_a_plain_one(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    frozen = Linear(16, 24, bias=bias, dtype=dtype).requires_grad_(False)
    plain = nn.Linear(16, 24, bias=bias, dtype=dtype).requires_grad_(False)
    plain.load_state_dict(frozen.state_dict())
    x = torch.randn(shape, dtype=dtype)
    ours, theirs = gradient(frozen, x), gradient(plain, x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(frozen(x), theirs[0])
    with torch.inference_mode():
        torch.testing.assert_close(frozen(x), theirs[0])


def test_weights_that_train_get_their_gradients() -> None:
    layer = Linear(16, 24)
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.bias.grad is not None
    assert x.grad is not None


def test_the_fast_product_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = Linear(16, 24).requires_grad_(False)
    x = torch.randn(5, 16)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def _ttm() -> TTMBackbone:
    torch.manual_seed(0)
    config = TinyTimeMixerConfig(
        context_length=32, prediction_length=8, patch_length=8, d_model=16, decoder_d_model=8, dropout=0, head_dropout=0
    )
    return TTMBackbone(TinyTimeMixerForPrediction(config))


def test_a_frozen_tinytimemixer_equals_its_modules_in_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = _ttm().double()
    for parameter in backbone.parameters():  # norms that do something
        parameter.data += 0.1 * torch.randn_like(parameter)
    x = torch.randn(7, 32, dtype=torch.float64)
    with backbone.unfrozen():
        expected = gradient(backbone, x)
        assert all(parameter.grad is not None for parameter in backbone.parameters())
    for size in (1, 100):
        monkeypatch.setattr(ttm_frozen, "_CHUNK", size)
        torch.testing.assert_close(gradient(backbone, x), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(backbone(x), expected[0], rtol=1e-9, atol=1e-9)


def test_counting_the_work_of_a_forecast_sees_every_product() -> None:
    assert forward_cost(_ttm().freeze(), 32, 8) > 2 * 32 * 16  # the patch embedding alone
    backbone = load_backbone("fracast", context_length=64)
    assert forward_cost(backbone, 64, 48) > 0
