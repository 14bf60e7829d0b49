"""Gradients that are computed along with the loss, piece by piece, are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from toy_backbones import NormalisedToy

from dualweaver.adapters import DualWeaverAdapter, woven
from dualweaver.compute.streaming import kept_bytes, streamed_sum


def gradient(adapter: DualWeaverAdapter, window: Tensor) -> list[Tensor]:
    backbone = NormalisedToy(12, 4).double()
    reference = adapter.reference_loss(backbone, window, 12, 4) if adapter.needs_reference else None
    adapter.zero_grad()
    torch.manual_seed(0)  # of dropout
    loss = adapter.objective(backbone, window, 12, 4, reference)
    loss.backward()
    return [loss.detach(), *(weights.grad.clone() for weights in adapter.parameters() if weights.grad is not None)]


@pytest.mark.parametrize(
    ("objective", "regularisation"), [("paper", 0.0), ("reconstruction", 0.0), ("reconstruction", 0.5)]
)
def test_a_batch_in_pieces_has_the_loss_and_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, objective: str, regularisation: float
) -> None:
    torch.manual_seed(0)
    adapter = DualWeaverAdapter(3, [0, 2], objective=objective, regularisation=regularisation).double()
    for parameter in adapter.parameters():
        parameter.data += 0.1 * torch.rand_like(parameter)
    window = torch.randn(5, 16, 3, dtype=torch.float64)
    whole = gradient(adapter, window)
    assert len(whole) == 1 + len(list(adapter.parameters()))
    monkeypatch.setattr(woven, "SMALL", 0)
    for budget in (1, 3000):  # one pair at a time, and a few
        monkeypatch.setattr(woven, "KEPT_AT_ONCE", {True: budget, False: budget})
        torch.testing.assert_close(gradient(adapter, window), whole, rtol=1e-10, atol=1e-12)


def test_memory_is_that_of_a_piece() -> None:
    alive, most = 0, 0

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            nonlocal alive, most
            alive += len(x)
            most = max(most, alive)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            nonlocal alive
            alive -= len(grad)
            return grad

    rows = torch.randn(10, 3, requires_grad=True)
    streamed_sum(lambda x: Counted.apply(x).square().sum(), [rows], 4).backward()
    assert most == 4
    torch.testing.assert_close(rows.grad, 2 * rows)


def test_what_is_kept_is_counted_without_weights() -> None:
    weight = torch.randn(100, 100)
    rows = torch.randn(5, 100, requires_grad=True)
    assert kept_bytes(lambda x: (x @ weight).sum(), [rows], [weight]) == 0
    assert kept_bytes(lambda x: (x @ weight).exp().sum(), [rows], [weight]) == 400
