"""Timer against the recorded numbers of its reference: one model with a single head, one with two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from golden import MODES, Mode, assert_matches, dtype_of, load, model_directory, outputs
from torch import Tensor

from dualweaver.backbones.decoder import rotary_tables
from dualweaver.backbones.timer import TimerBackbone, TimerForPrediction

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ("timer_a", "timer_b")
Inputs = dict[str, Tensor]
Output = Callable[[TimerForPrediction, Inputs], Tensor]


def _limited(limit: int) -> Output:
    return lambda model, given: model(given["x"], max_output_length=limit)


def _hidden(layer: int) -> Output:
    return lambda model, given: model.hidden_states(given["x"])[layer]


def _generated(horizon: int, series: str = "x") -> Output:
    return lambda model, given: model.rollout(given[series], horizon)


OUTPUTS: dict[str, Output] = {
    "logits": lambda model, given: model(given["x"]),
    "logits_revin": lambda model, given: model(given["x"], revin=True),
    "logits_edge_revin": lambda model, given: model(given["x_edge"], revin=True),
    **{f"logits_maxout{limit}": _limited(limit) for limit in (10, 24, 95, 96, 250)},
    **{f"hidden{layer}": _hidden(layer) for layer in range(3)},
    "arloss": lambda model, given: model.token_loss(given["x"], given["y"]),
    "arloss_revin": lambda model, given: model.token_loss(given["x"], given["y"], revin=True),
    "arloss_predictions_head0": lambda model, given: model.token_predictions(given["x"]),
    **{f"gen{horizon}": _generated(horizon) for horizon in (10, 96, 192, 250, 720)},
    **{f"gen{horizon}_edge": _generated(horizon, "x_edge") for horizon in (96, 192)},
    "gen192_norevin": lambda model, given: model.rollout(given["x"], 192, revin=False),
    "gen192_nocache": lambda model, given: model.rollout(given["x"], 192, use_cache=False),
    "rem_logits": lambda model, given: model(given["x_rem"]),
    "rem_logits_revin": lambda model, given: model(given["x_rem"], revin=True),
    "rem_arloss": lambda model, given: model.token_loss(given["x_rem"], given["y_rem"]),
    "rem_gen192": _generated(192, "x_rem"),
}


def backbone(name: str, mode: Mode) -> TimerBackbone:
    return TimerBackbone.from_checkpoint(model_directory(name), dtype=dtype_of(mode), context_length=672)


def inputs(name: str, mode: Mode, file: str = "forward.safetensors") -> Inputs:
    return {key: value.to(dtype_of(mode)) for key, value in load(name, file).items() if "__" not in key}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_output_matches_the_reference(output: str, name: str, mode: Mode) -> None:
    if output not in outputs(name, "forward.safetensors", mode):
        pytest.skip(f"{name} has no recording of {output}")
    with torch.no_grad():
        ours = OUTPUTS[output](backbone(name, mode).model, inputs(name, mode))
    assert_matches(output, ours, name, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_every_recorded_output_has_a_test(name: str, mode: Mode) -> None:
    assert outputs(name, "forward.safetensors", mode) <= set(OUTPUTS)


def test_rotary_tables_match_the_reference() -> None:
    recorded = load("timer_a")
    cosines, sines = rotary_tables(0, 80, head_dim=16, like=torch.zeros(()))
    torch.testing.assert_close(cosines, recorded["rope_cos_f32_first80"], rtol=0, atol=1e-5)
    torch.testing.assert_close(sines, recorded["rope_sin_f32_first80"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_gradients_matches_the_reference_too(name: str, mode: Mode) -> None:
    given = inputs(name, mode)["x"].requires_grad_()
    assert_matches("gen720", backbone(name, mode)(given, 720), name, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_backbone_with_context_rollout_matches_the_uncached_reference(name: str, mode: Mode) -> None:
    loaded = TimerBackbone.from_checkpoint(model_directory(name), dtype=dtype_of(mode), rollout="context")
    with torch.no_grad():
        assert_matches("gen192_nocache", loaded(inputs(name, mode)["x"], 192), name, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_cast_to_float64_after_loading_matches_the_float64_reference(name: str, mode: Mode) -> None:
    loaded = backbone(name, mode).double()
    with torch.no_grad():
        assert_matches("gen720", loaded(inputs(name, "f64")["x"], 720), name, "f64")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_fine_tuning_loss_and_every_gradient_match_the_reference(name: str, mode: Mode) -> None:
    recorded, file = f"sft_{name}", "golden.safetensors"
    given = inputs(recorded, mode, file)
    loaded = backbone(name, mode)
    with torch.no_grad():
        assert_matches("eval_p96", loaded(given["batch_x"], 96), recorded, mode, file)
    with loaded.unfrozen():
        loaded.train()
        loss = loaded.loss(given["batch_x"], given["batch_y"]).mean()
        loss.backward()
        gradients = {f"grad.ltm.{key}": weights.grad for key, weights in loaded.model.named_parameters()}
    assert_matches("loss", loss, recorded, mode, file)
    assert outputs(recorded, file, mode) == {"loss", "eval_p96", *gradients}
    for key, gradient in gradients.items():
        assert gradient is not None
        assert_matches(key, gradient, recorded, mode, file)
