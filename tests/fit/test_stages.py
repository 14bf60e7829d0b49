"""What `fit` trains, in which order, and what it leaves of each stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from staged import CONTEXT, HORIZON, TRIALS, TUNED_WOVEN, WOVEN, fitted, frame, stage_names
from torch import Tensor, nn
from toy_backbones import LinearToy, NormalisedToy

from dualweaver import DualWeaver
from dualweaver.adapters import AdaPTS, DualWeaverAdapter, FineTune
from dualweaver.backbones import Backbone
from dualweaver.data.windows import WindowDataset
from dualweaver.errors import DataError
from dualweaver.fit import reconstruction, stages
from dualweaver.fit.reconstruction import covered_rows
from dualweaver.fit.selection import NOISE_WEIGHT
from dualweaver.fit.stages import fit_reconstruction
from dualweaver.method import FILTER_SHARES

pytestmark = pytest.mark.usefixtures("one_thread")


class PatchToy(NormalisedToy):
    """Its own loss looks at labels from step 4 on and nine steps ahead, and is told the horizon."""

    def __init__(self) -> None:
        super().__init__(CONTEXT, HORIZON)
        self.seen: set[tuple[int, int, int | None]] = set()

    def label_start(self, context_length: int) -> int:
        return 4

    def label_horizon(self, horizon: int) -> int:
        return 9

    def loss(self, context: Tensor, labels: Tensor, *, horizon: int | None = None, **settings: Any) -> Tensor:
        self.seen.add((context.shape[1], labels.shape[1], horizon))
        return (self(context, 9) - labels[:, -9:]).square().mean(dim=1, keepdim=True)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, WOVEN),
        ({"context_filter": False}, ["dualweaver"]),
        ({"adapter": "adapts"}, ["adapts: reconstruction", "adapts"]),
        ({"adapter": "fine-tune"}, [*TRIALS, "fine-tune"]),
        ({"adapter": "fine-tune", "learning_rate": 1e-3}, ["fine-tune"]),
        ({"adapter": "fine-tune", "fine_tune": True}, [*TRIALS, "fine-tune"]),
        ({"fine_tune": True}, [*TRIALS, "fine-tune", *TUNED_WOVEN]),
        ({"fine_tune": True, "learning_rate": 1e-3}, [*TRIALS, "fine-tune", *TUNED_WOVEN]),
        ({"fine_tune": True, "adapter": "adapts"}, [*TRIALS, "fine-tune", "adapts: reconstruction", "adapts"]),
        ({"adapter": "zero-shot"}, []),
    ],
)
def test_history_names_the_stages_in_their_order(settings: dict[str, Any], expected: list[str]) -> None:
    assert stage_names(fitted(NormalisedToy(), **settings)) == expected


@pytest.mark.parametrize("settings", [{"objective": "paper"}, {"adapter": "fine-tune"}, {"fine_tune": True}])
def test_native_losses_see_all_their_labels_and_the_horizon_asked_for(settings: dict[str, Any]) -> None:
    model = fitted(PatchToy(), **settings)
    backbone = model.pipeline_.backbone
    assert isinstance(backbone, PatchToy)
    assert backbone.seen == {(CONTEXT, CONTEXT - 4 + 9, HORIZON)}
    assert model.predict().shape == (HORIZON, 3)


def test_too_few_rows_for_a_native_loss_are_explained() -> None:
    with pytest.raises(DataError, match="the 9 steps ahead that the backbone's own loss looks at"):
        DualWeaver(PatchToy(), HORIZON, context_length=CONTEXT, objective="paper", verbose=False).fit(frame(24))


def test_fine_tuning_leaves_the_callers_backbone_alone() -> None:
    given = NormalisedToy()
    before = given.fingerprint()
    model = fitted(given, fine_tune=True)
    assert given.fingerprint() == before
    assert model.pipeline_.backbone.fingerprint() != before
    assert not any(weights.requires_grad for weights in model.pipeline_.backbone.parameters())


def test_the_rate_of_fine_tuning_is_the_one_with_the_lowest_validation_error() -> None:
    history = fitted(NormalisedToy(), adapter="fine-tune").history_.set_index("stage")
    trials = history.loc[TRIALS]
    tried = trials[trials["epoch"] == 1]
    chosen = tried["learning_rate"].iloc[int(tried["val_mse"].argmin())]
    final = history.loc["fine-tune"]
    assert final["learning_rate"].iloc[1] == chosen
    # every trial and the final run start from the untouched weights
    assert len(set(history[history["epoch"] == 0]["val_mse"])) == 1
    assert final["val_mse"].iloc[1] == pytest.approx(tried["val_mse"].min(), rel=1e-6)


@pytest.mark.parametrize(("tuned", "batch", "lower"), [(False, 8, False), (True, 8, True), (True, 32, False)])
def test_around_a_fine_tuned_backbone_many_steps_go_at_a_lower_rate(tuned: bool, batch: int, lower: bool) -> None:
    history = fitted(NormalisedToy(), fine_tune=tuned, batch_size=batch).history_.set_index("stage")
    usual = stages.LEARNING_RATES["dualweaver"]
    assert history["learning_rate"]["dualweaver"].max() == (stages.TUNED_RATE if lower else usual)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_filter_is_trained_to_the_end_and_left_there_but_not_around_a_fine_tuned_backbone(
    tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = DualWeaverAdapter.objective
    monkeypatch.setattr(DualWeaverAdapter, "objective", lambda *arguments: -loss(*arguments))  # it only does harm
    history = fitted(NormalisedToy(), fine_tune=tuned, max_epochs=9).history_.set_index("stage")["val_mse"]
    course, shares = history["dualweaver"].tolist(), history.filter(like="share").tolist()
    assert course[0] == min(course)
    if tuned:
        assert len(course) == 2 + stages.PATIENCE  # untrained, and so many after the first epoch
        assert shares == []  # nothing that was learned is kept
    else:
        assert len(course) == 1 + 9
        assert shares[FILTER_SHARES.index(0.5)] == pytest.approx(course[-1], rel=1e-5)  # half, as epochs are scored


def test_fine_tuning_that_only_does_harm_leaves_the_backbone_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = FineTune.objective
    monkeypatch.setattr(FineTune, "objective", lambda *arguments: -loss(*arguments))
    given = NormalisedToy()
    model = fitted(given, adapter="fine-tune")
    assert model.pipeline_.backbone.fingerprint() == given.fingerprint()


def test_a_target_that_zero_shot_cannot_foresee_at_all_counts_little_in_training() -> None:
    class Persistence(NormalisedToy):
        def native(self, context: Tensor) -> Tensor:
            return context[:, -1:].expand(-1, HORIZON) + 0 * super().native(context)

    df = frame(2000).assign(noise=np.random.default_rng(1).normal(size=2000))
    settings: dict[str, Any] = {"context_length": CONTEXT, "max_epochs": 1, "verbose": False}
    model = DualWeaver(Persistence(), HORIZON, **settings).fit(df)
    assert model.pipeline_.adapter.weights.tolist() == pytest.approx([1, 1, 1, NOISE_WEIGHT])
    # what epochs are compared by counts it as little
    error = model.scores_["zero_shot_mse"].to_numpy()
    first = model.history_["val_mse"].iloc[0]  # persistence is odd: untrained, the method repeats zero-shot
    assert first == pytest.approx(np.average(error, weights=[1, 1, 1, NOISE_WEIGHT]), rel=1e-5)
    # where nothing else is there it counts in full, as in what is published
    alone = DualWeaver(Persistence(), HORIZON, **settings).fit(df[["noise"]])
    assert alone.pipeline_.adapter.weights.tolist() == [1]
    for published in ({"adapter": "adapts"}, {"objective": "paper"}):
        baseline = DualWeaver(Persistence(), HORIZON, **{**settings, **published}).fit(df)
        assert baseline.pipeline_.adapter.weights.tolist() == [1, 1, 1, 1]


def test_the_same_seed_fits_the_same_bits_through_all_stages() -> None:
    first, second = (fitted(NormalisedToy(), fine_tune=True, adapter="adapts").predict() for _ in range(2))
    pd.testing.assert_frame_equal(first, second, check_exact=True)


# The pre-fit of AdaPTS


def rows(seed: int, count: int = 400) -> Tensor:
    mixing = torch.randn(2, 5, generator=torch.Generator().manual_seed(9))
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)) @ mixing


def adapts() -> AdaPTS:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AdaPTS(5, [3, 1])


def test_the_pre_fit_reproduces_the_targets_of_unseen_rows() -> None:
    adapter, unseen = adapts(), rows(2)
    history = fit_reconstruction(adapter, rows(1), unseen, seed=0)
    best = min(row["val_mse"] for row in history)
    with torch.no_grad():
        assert float(adapter.reconstruction_loss(unseen)) == pytest.approx(best)
    assert best < 1e-3
    assert len(history) <= reconstruction.RECONSTRUCTION_EPOCHS


def test_the_pre_fit_stops_when_validation_stops_improving_and_keeps_the_best() -> None:
    adapter, unseen = adapts(), torch.full((30, 5), 50.0)  # nothing to be learned from the training rows
    history = fit_reconstruction(adapter, rows(1, count=20), unseen, seed=0)
    errors = [row["val_mse"] for row in history]
    best = int(np.argmin(errors))
    assert len(errors) == best + 1 + reconstruction.RECONSTRUCTION_PATIENCE < reconstruction.RECONSTRUCTION_EPOCHS
    with torch.no_grad():
        assert float(adapter.reconstruction_loss(unseen)) == pytest.approx(errors[best]) != errors[-1]


def test_the_pre_fit_is_the_same_for_the_same_seed() -> None:
    weights = []
    for seed in (0, 0, 1):
        adapter = adapts()
        fit_reconstruction(adapter, rows(1), rows(2), seed)
        weights.append(nn.utils.parameters_to_vector(adapter.parameters()).detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_pre_fit_sees_no_validation_rows_and_is_scored_on_no_training_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Tensor] = {}

    def spy(adapter: AdaPTS, train: Tensor, validation: Tensor, seed: int) -> list[dict[str, Any]]:
        seen.update(train=train, validation=validation)
        return []

    monkeypatch.setattr(stages, "fit_reconstruction", spy)
    model = fitted(NormalisedToy(), adapter="adapts")
    scaled = model.pipeline_.scale(frame().to_numpy())
    torch.testing.assert_close(seen["train"], scaled[:208])  # validation_size is a fifth of 260 rows
    torch.testing.assert_close(seen["validation"], scaled[208:])


def test_covered_rows_are_those_inside_windows_from_a_step_on() -> None:
    windows = WindowDataset(torch.zeros(12, 1), [0, 1, 6], 4)
    assert covered_rows(windows).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert covered_rows(windows, 3).nonzero().flatten().tolist() == [3, 4, 9]


def test_wide_windows_are_accumulated_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()

    class Counting(LinearToy):
        def native(self, context: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                sizes.add(len(context))
            return super().native(context)

    monkeypatch.setattr(stages, "SERIES_PER_BATCH", 24)
    backbone: Backbone = Counting(CONTEXT, HORIZON)
    fitted(backbone, batch_size=16)
    assert max(sizes) == 24  # four windows of three channels and two surrogates
