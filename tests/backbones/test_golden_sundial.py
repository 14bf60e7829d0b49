"""Sundial against the recorded numbers of its reference, under the noise that the reference drew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from golden import MODES, Mode, assert_matches, dtype_of, load, model_directory, outputs
from torch import Tensor

from dualweaver.backbones.flow import sinusoids
from dualweaver.backbones.sundial import SundialBackbone, SundialForPrediction

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "sundial_a"
Inputs = dict[str, Tensor]
Output = Callable[[SundialForPrediction, Inputs], Tensor]


def _noise(given: Inputs, case: str) -> list[Tensor]:
    keys = sorted(key for key in given if key.startswith(f"noise__{case}__"))
    return [given[key] for key in keys]


def _hidden(layer: int, series: str = "x") -> Output:
    return lambda model, given: model.hidden_states(given[series])[layer]


def _samples(case: str, series: str, horizon: int, num_samples: int, *, revin: bool = True) -> Output:
    return lambda model, given: model.sample(
        given[series], horizon, num_samples, noise=_noise(given, case), revin=revin
    )


def _loss(case: str, series: str, pred_len: int, *, revin: bool = False) -> Output:
    def compute(model: SundialForPrediction, given: Inputs) -> Tensor:
        noise, times = _noise(given, case)
        losses = model.token_loss(given[series], given["y"], pred_len=pred_len, noise=noise, times=times, revin=revin)
        return losses.flatten()

    return compute


OUTPUTS: dict[str, Output] = {
    "embed": _hidden(0),
    **{f"hidden{layer}": _hidden(layer) for layer in range(3)},
    "rem_embed": _hidden(0, "x_rem"),
    "rem_hidden_last": _hidden(-1, "x_rem"),
    "flownet_time_embedding": lambda model, given: sinusoids(given["flownet_t"]),
    "flownet_out": lambda model, given: model.flow_loss.net(given["flownet_x"], given["flownet_t"], given["flownet_c"]),
    "gen40_ns4": _samples("gen40_ns4", "x", 40, 4),
    "gen96_ns4": _samples("gen96_ns4", "x", 96, 4),
    "gen200_ns4": _samples("gen200_ns4", "x", 200, 4),
    "gen200_ns5": _samples("gen200_ns5", "x", 200, 5),
    "gen200_ns4_edge": _samples("gen200_ns4_edge", "x_edge", 200, 4),
    "gen200_ns4_norevin": _samples("gen200_ns4_norevin", "x", 200, 4, revin=False),
    "rem_gen200_ns4": _samples("rem_gen200_ns4", "x_rem", 200, 4),
    "sample_forward_ns4": _samples("sample_forward_ns4", "x", 96, 4, revin=False),
    "sample_forward_ns4_maxout40": _samples("sample_forward_ns4_maxout40", "x", 40, 4, revin=False),
    "loss_pred48": _loss("loss_pred48", "x", 48),
    "loss_pred96": _loss("loss_pred96", "x", 96),
    "loss_pred96_revin": _loss("loss_pred96_revin", "x", 96, revin=True),
    "loss_pred96_edge_revin": _loss("loss_pred96_edge_revin", "x_edge", 96, revin=True),
}


def backbone(mode: Mode) -> SundialBackbone:
    return SundialBackbone.from_checkpoint(model_directory(NAME), dtype=dtype_of(mode), context_length=160)


def inputs(mode: Mode) -> Inputs:
    recorded = load(NAME)
    return {key: value.to(dtype_of(mode)) for key, value in recorded.items() if not key.endswith(("f32", "f64"))}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_output_matches_the_reference(output: str, mode: Mode) -> None:
    with torch.no_grad():
        ours = OUTPUTS[output](backbone(mode).model, inputs(mode))
    assert_matches(output, ours, NAME, mode)


@pytest.mark.parametrize("mode", MODES)
def test_every_recorded_output_has_a_test(mode: Mode) -> None:
    assert outputs(NAME, "forward.safetensors", mode) <= set(OUTPUTS)


@pytest.mark.parametrize("mode", MODES)
def test_generation_with_gradients_matches_the_reference_too(mode: Mode) -> None:
    given = inputs(mode)
    samples = backbone(mode).sample(given["x"].requires_grad_(), 200, 4, noise=_noise(given, "gen200_ns4"))
    assert_matches("gen200_ns4", samples, NAME, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_cast_to_float64_after_loading_matches_the_float64_reference(mode: Mode) -> None:
    with torch.no_grad():
        ours = OUTPUTS["gen200_ns4"](backbone(mode).double().model, inputs("f64"))
    assert_matches("gen200_ns4", ours, NAME, "f64")


@pytest.mark.parametrize("mode", MODES)
def test_fine_tuning_loss_and_every_gradient_match_the_reference(mode: Mode) -> None:
    file, given, loaded = "sft_grads.safetensors", inputs(mode), backbone(mode)
    noise, times = _noise(given, "loss_pred48")
    with loaded.unfrozen():
        loaded.train()
        loss = loaded.loss(given["x"], given["y"], horizon=48, noise=noise, times=times).mean()
        loss.backward()
        gradients = {f"grad.{key}": weights.grad for key, weights in loaded.model.named_parameters()}
    assert_matches("loss", loss, NAME, mode, file)
    assert outputs(NAME, file, mode) == {"loss", *gradients}
    for key, gradient in gradients.items():
        assert gradient is not None
        assert_matches(key, gradient, NAME, mode, file)
