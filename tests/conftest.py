"""What all tests share."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import golden
import pandas as pd
import pytest
import torch
from places import SHARED
from traps import Trap

from dualweaver.data.catalogue import describe_dataset, load_dataset

# Real data lie beside the repository where there are any; whoever keeps them elsewhere says where.
if (SHARED / "data").is_dir():
    os.environ.setdefault("DUALWEAVER_DATA", str(SHARED / "data"))


@cache
def _benchmark(name: str) -> pd.DataFrame:
    return load_dataset(name)


@pytest.fixture
def benchmark() -> Callable[[str], pd.DataFrame]:
    """Loads a benchmark data set by name; skips the test where its file is not there, and never downloads it."""

    def load(name: str) -> pd.DataFrame:
        folder = Path(os.environ.get("DUALWEAVER_DATA", "."))
        if not any((folder / file_name).is_file() for file_name in describe_dataset(name).file_names):
            pytest.skip(f"the data set {name!r} is not in the folder that DUALWEAVER_DATA names")
        return _benchmark(name).copy()

    return load


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that waking a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def sprung(tmp_path: Path) -> Iterator[Path]:
    """The file that a trap would create; it works, and is never there after a test."""
    file = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(file)))
    assert file.exists()
    file.unlink()
    yield file
    assert not file.exists()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if golden.compared():
        terminalreporter.write_line(f"golden: {golden.compared()} tensors compared")
