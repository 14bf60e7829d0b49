"""`adapter="auto"`: what it trains, and that it keeps what validation prefers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from staged import CONTEXT, HORIZON, TRIALS, TUNED_WOVEN, WOVEN, fitted, frame, stage_names
from toy_backbones import NormalisedToy

from dualweaver import DualWeaver
from dualweaver.fit import stages

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def auto() -> DualWeaver:
    return fitted(NormalisedToy(CONTEXT, HORIZON), adapter="auto", max_epochs=3)


def validation_error(model: DualWeaver) -> float:
    return float(model.scores_["mse"].mean())


def test_it_trains_the_adapter_then_fine_tunes_then_adapts_what_was_fine_tuned(auto):
    assert stage_names(auto) == [*WOVEN, *TRIALS, "fine-tune", *(f"fine-tuned: {name}" for name in TUNED_WOVEN)]


def test_it_is_as_good_on_validation_as_the_best_of_its_candidates(auto):
    toy = NormalisedToy(CONTEXT, HORIZON)
    single = [
        fitted(toy, max_epochs=3, **settings)
        for settings in ({}, {"adapter": "fine-tune"}, {"fine_tune": True}, {"adapter": "zero-shot"})
    ]
    errors = [validation_error(model) for model in single]
    assert validation_error(auto) == min(errors)
    best = single[int(np.argmin(errors))]
    pd.testing.assert_frame_equal(auto.predict(), best.predict())
    assert (auto.adapter_, auto.fine_tuned_) == (best.adapter_, best.fine_tuned_)


def test_what_it_kept_survives_saving(auto, tmp_path: Path):
    auto.save(tmp_path / "model")
    loaded = DualWeaver.load(tmp_path / "model", backbone=NormalisedToy(CONTEXT, HORIZON))
    assert (loaded.adapter_, loaded.fine_tuned_, loaded.adapter) == (auto.adapter_, auto.fine_tuned_, "auto")
    pd.testing.assert_frame_equal(loaded.predict(), auto.predict())


def test_nothing_is_repeated_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fit() -> DualWeaver:
        model = DualWeaver(
            NormalisedToy(CONTEXT, HORIZON),
            HORIZON,
            context_length=CONTEXT,
            adapter="auto",
            max_epochs=2,
            verbose=False,
        )
        return model.fit(frame(), resume=tmp_path / "fit")

    first = fit()
    monkeypatch.setattr("lightning.Trainer.fit", lambda *args, **kwargs: pytest.fail("trained again"))
    pd.testing.assert_frame_equal(fit().predict(), first.predict())


def test_stopping_it_early_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch):
    train = stages.train_adapter

    def stopped(*args, **kwargs):
        course = train(*args, **kwargs)
        course.interrupted = True
        return course

    monkeypatch.setattr(stages, "train_adapter", stopped)
    model = fitted(NormalisedToy(CONTEXT, HORIZON), adapter="auto")
    assert stage_names(model) == ["dualweaver"]
    assert model.adapter_ == "dualweaver"
