"""Promises 27 and 30 of the contract: what cannot be used gets one clear error, in one line."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn
from toys import CONTEXT, Toy, refusal, waves, weaver

from dualweaver import DualWeaver, load_backbone

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("df", "settings", "words"),
    [
        (waves().iloc[:0], {}, ["no rows"]),
        (waves()[[]], {}, ["no numeric column"]),
        (waves(columns="a").assign(a="north"), {}, ["no numeric column", "'a'", "'north'"]),
        (waves(), {"horizon": 0}, ["horizon=0"]),
        (waves(), {"horizon": -3}, ["horizon=-3"]),
        (waves(), {"horizon": 2.5}, ["horizon=2.5"]),
        (waves(), {"channel_sample": 0}, ["channel_sample=0"]),
        (waves(), {"context_length": 0}, ["context_length=0"]),
        (waves(), {"context_length": 31}, ["[1, 31]", "context_length"]),
        (waves(), {"backbone": "chronoss"}, ["'chronoss'", "flowstate, fracast, loom, sundial, timer, timesfm, ttm"]),
        (waves(), {"adapter": "lora"}, ["'lora'", "adapts, dualweaver, fine-tune, joint, zero-shot"]),
        (waves(), {"targets": ["z"]}, ["'z'", "'a'"]),
        (waves() * 1e150, {}, ["'a'", "rescale"]),
        ([1.0, 2.0], {}, ["DataFrame", "list"]),
    ],
)
def test_27_what_cannot_be_fitted_gets_one_clear_error(df, settings, words):
    backbone = settings.pop("backbone", Toy())
    message = refusal(weaver(backbone, **settings).fit, df)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"horizon": 0}, ["horizon=0"]),
        ({"horizon": -1}, ["horizon=-1"]),
        ({"quantiles": [0.5, 1.5]}, ["quantile 1.5", "(0, 1)"]),
        ({"quantiles": [0]}, ["quantile 0 ", "(0, 1)"]),
        ({"quantiles": ["half"]}, ["'half'", "(0, 1)"]),
        ({"quantiles": [float("nan")]}, ["nan", "(0, 1)"]),
        ({"level": [80, 100]}, ["level 100", "(0, 100)"]),
        ({"df": waves().iloc[:0]}, ["no rows"]),
    ],
)
def test_27_what_cannot_be_predicted_gets_one_clear_error(arguments, words):
    message = refusal(weaver(adapter="zero-shot").fit(waves()).predict, **arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign", "empty"])
@pytest.mark.parametrize("name", ["config.json", "adapter.safetensors", "backbone.safetensors"])
def test_30_a_damaged_folder_is_refused_by_the_name_of_the_file(name, damage, tmp_path):
    weaver(adapter="fine-tune", max_epochs=1).fit(waves()).save(tmp_path / "saved")
    file: Path = tmp_path / "saved" / name
    content = file.read_bytes()
    file.unlink()
    if damage == "foreign":
        file.write_bytes(b'{"architectures": ["Other"]}' if name.endswith("json") else b"\x80\x04K\x01.")
    elif damage != "missing":
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name in refusal(DualWeaver.load, tmp_path / "saved", backbone=Toy())


def test_30_another_backbone_is_refused_with_both_hashes(tmp_path):
    model = weaver().fit(waves())
    model.save(tmp_path / "saved")
    other: nn.Module = Toy(seed=1)
    message = refusal(DualWeaver.load, tmp_path / "saved", backbone=other)
    assert model.pipeline_.untouched.fingerprint()[:12] in message
    assert load_backbone(other, context_length=CONTEXT).fingerprint()[:12] in message
