"""Promises of the contract about memory, bits across processes and Ctrl-C; the numbers are the contract's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from places import HELPERS
from torch import Tensor
from toys import Toy, waves, weaver
from transformers import PreTrainedModel

import dualweaver.forecast.pipeline
from dualweaver import DualWeaver
from dualweaver.backbones.ttm import TinyTimeMixerConfig, TinyTimeMixerForPrediction
from dualweaver.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 2**20

# a small fit loads all libraries and warms their caches; what comes after is what the data cost
MEASURE = """
import json, resource, sys, time, warnings
import numpy as np, pandas as pd
sys.path.insert(0, {tests!r})
from toys import Toy, waves, weaver

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

weaver(max_epochs=1).fit(waves()).predict(level=[80])
start, began = peak(), time.perf_counter()
{body}
print(json.dumps(dict(extra=peak() - start, seconds=time.perf_counter() - began, **found)))
"""


def measured(body: str) -> Any:
    """What `found` holds after `body` ran in a process of its own, with its peak of memory above that of a tiny fit."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE.format(tests=str(HELPERS), body=body)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_17_hundreds_of_channels_run_within_a_stated_memory():
    found = measured("""
found = {}
for channels in (321, 862):
    df = pd.DataFrame(np.random.default_rng(0).normal(size=(620, channels)), index=waves(620).index)
    model = weaver(Toy(512), context_length=512, max_epochs=1, validation_size=12, window_stride=8)
    forecast = model.fit(df).predict(level=[80])
    assert forecast.shape == (8, 3 * channels) and np.isfinite(forecast.to_numpy()).all()
    found[str(channels)] = peak() - start
""")
    assert found["321"] < 150 * MIB
    assert found["862"] < 300 * MIB


@pytest.mark.parametrize("adapter", ["dualweaver", "zero-shot"])
def test_17_forecasts_equal_those_made_in_channel_chunks(adapter, monkeypatch):
    random = np.random.default_rng(0)
    df = pd.DataFrame(random.normal(size=(700, 321)).cumsum(axis=0), index=waves(700).index)
    settings = {"context_length": 512, "max_epochs": 1, "adapter": adapter, "validation_size": 20}
    model = weaver(Toy(512), window_stride=48, **settings).fit(df)
    model.pipeline_.fallback[:] = False
    whole = model.predict(level=[80])
    monkeypatch.setattr(dualweaver.forecast.pipeline, "SERIES_AT_ONCE", 100)
    pd.testing.assert_frame_equal(model.predict(level=[80]), whole, rtol=1e-5, atol=1e-5)
    if adapter == "zero-shot":
        part = weaver(Toy(512), **settings).fit(df.iloc[:, 100:150])
        np.testing.assert_allclose(part.predict(), whole[list(part.columns_)], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def ttm(tmp_path_factory) -> str:
    """A tiny TinyTimeMixer with random weights, in the layout of the hub."""
    folder = tmp_path_factory.mktemp("checkpoint") / "ttm-tiny"
    config = TinyTimeMixerConfig(
        context_length=64, prediction_length=16, patch_length=8, d_model=16, decoder_d_model=8, num_layers=1
    )
    torch.manual_seed(0)
    model: PreTrainedModel = TinyTimeMixerForPrediction(config)
    model.save_pretrained(folder)
    return str(folder)


def test_20_a_forecaster_saved_in_one_process_gives_equal_bits_in_another(ttm, tmp_path):
    df = waves(500, [f"sensor {number}" for number in range(21)])
    model = weaver(f"ttm:{ttm}", horizon=16, context_length=64, max_epochs=1).fit(df)
    model.pipeline_.fallback[:] = False
    model.save(tmp_path / "saved")
    assert sum(file.stat().st_size for file in (tmp_path / "saved").iterdir()) < 1e6
    assert sorted(file.name for file in (tmp_path / "saved").iterdir()) == ["adapter.safetensors", "config.json"]
    known = json.loads((tmp_path / "saved" / "config.json").read_text())["backbone"]
    assert (known["name"], known["checkpoint"], known["revision"]) == ("ttm", ttm, None)
    assert known["sha256"] == model.pipeline_.untouched.fingerprint()

    # as many threads as here: a product that is split in another way is rounded in another way
    load = f"import sys, numpy as np, torch, dualweaver; torch.set_num_threads({torch.get_num_threads()});"
    load += "f = dualweaver.DualWeaver.load(sys.argv[1]).predict(level=[80]);"
    load += "np.savez(sys.argv[2], values=f.to_numpy(), stamps=f.index.asi8)"
    subprocess.run([sys.executable, "-c", load, tmp_path / "saved", tmp_path / "forecast.npz"], check=True)
    found, expected = np.load(tmp_path / "forecast.npz"), model.predict(level=[80])
    np.testing.assert_array_equal(found["values"], expected.to_numpy())
    np.testing.assert_array_equal(found["stamps"], np.asarray(expected.index).view("int64"))


def test_20_a_checkpoint_that_changed_is_refused(ttm, tmp_path):
    model = weaver(f"ttm:{ttm}", horizon=16, context_length=64, adapter="zero-shot").fit(waves())
    model.save(tmp_path / "saved")
    torch.manual_seed(1)
    other: PreTrainedModel = TinyTimeMixerForPrediction(TinyTimeMixerConfig.from_pretrained(ttm))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=f"ttm .*{model.pipeline_.untouched.fingerprint()[:12]}.* but ttm:"):
        DualWeaver.load(tmp_path / "saved", backbone=f"ttm:{tmp_path / 'other'}")


def test_28_a_million_rows_are_fitted_within_three_times_the_frame():
    found = measured("""
index = pd.date_range("2000", periods=10**6, freq="min")
df = pd.DataFrame(np.random.default_rng(0).normal(size=(10**6, 8)), index=index)
size = int(df.memory_usage().sum())
forecast = weaver(max_epochs=1).fit(df).predict()
found = dict(size=size, shape=forecast.shape)
""")
    assert found["shape"] == [8, 8]
    assert found["extra"] < 3 * found["size"]  # the frame itself is one of the three


class Impatient(Toy):
    """Presses Ctrl-C in a batch of the third epoch, and again at the next forward where told to."""

    def __init__(self, presses: int) -> None:
        super().__init__()
        self.batches, self.presses = 0, presses

    def forward(self, x: Tensor) -> Tensor:
        self.batches += x.requires_grad
        if self.batches >= 25 and self.presses:
            self.presses -= 1
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_29_ctrl_c_keeps_the_best_adapter_and_says_so(tmp_path, capsys):
    model = weaver(Impatient(presses=1), max_epochs=50, window_stride=1, verbose=True)  # nine batches an epoch
    with pytest.warns(UserWarning, match=r"interrupted; the best weights so far \(epoch 3\) are kept"):
        model.fit(waves())
    assert "stopping" in capsys.readouterr().err
    assert model.history_["epoch"].tolist() == [0, 1, 2, 3]
    assert model.scores_["mse"].mean() == pytest.approx(model.history_["val_mse"].min(), rel=1e-4)
    assert model.predict().notna().all(axis=None)
    model.save(tmp_path / "saved")
    pd.testing.assert_frame_equal(DualWeaver.load(tmp_path / "saved", backbone=Toy()).predict(), model.predict())


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_29_a_second_ctrl_c_ends_the_fit_at_once_and_leaves_what_was_fitted_before(capfd):
    model = weaver(max_epochs=50, window_stride=1).fit(waves())
    expected = model.predict()
    model.set_params(backbone=Impatient(presses=2))
    with pytest.raises(KeyboardInterrupt):
        model.fit(waves(seed=1))
    pd.testing.assert_frame_equal(model.predict(), expected)
    assert capfd.readouterr() == ("", "")
