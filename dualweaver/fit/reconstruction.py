"""The first phase of AdaPTS: encoder and decoder learn to reproduce single rows."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from dualweaver.adapters import AdaPTS
from dualweaver.data.windows import WindowDataset

__all__ = ["covered_rows", "fit_reconstruction"]

# Each epoch sees random rows, so that its cost does not grow with the table.
RECONSTRUCTION_EPOCHS, RECONSTRUCTION_PATIENCE = 300, 10
RECONSTRUCTION_ROWS, RECONSTRUCTION_BATCH = 8192, 256
RECONSTRUCTION_RATE = 1e-3

History = list[dict[str, Any]]


def fit_reconstruction(adapter: AdaPTS, train: Tensor, validation: Tensor, seed: int) -> History:
    """Fit encoder and decoder to reproduce single rows, and leave them at their best validation error.

    Args:
        adapter: what is fitted.
        train, validation: rows `[time, channel]`.
        seed: of the order of rows.

    Returns:
        One row an epoch.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(adapter.parameters(), lr=RECONSTRUCTION_RATE)
    history: History = []
    best, best_epoch, weights = math.inf, 0, copy.deepcopy(adapter.state_dict())
    for epoch in range(1, RECONSTRUCTION_EPOCHS + 1):
        losses = []
        for rows in torch.randperm(len(train), generator=generator)[:RECONSTRUCTION_ROWS].split(RECONSTRUCTION_BATCH):
            loss = adapter.reconstruction_loss(train[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            error = float(adapter.reconstruction_loss(validation))
        history.append(
            {
                "epoch": epoch,
                "train_loss": float(torch.stack(losses).mean()),
                "val_mse": error,
                "learning_rate": RECONSTRUCTION_RATE,
            }
        )
        if error < best:
            best, best_epoch = error, epoch
            weights = copy.deepcopy(adapter.state_dict())  # the state dict alone would follow the training
        elif epoch - best_epoch >= RECONSTRUCTION_PATIENCE:
            break
    adapter.load_state_dict(weights)
    return history


def covered_rows(windows: WindowDataset, first: int = 0) -> Tensor:
    """Which rows of the table lie in a window, from its step `first` on: `[time]`, bool."""
    change = torch.zeros(len(windows.values) + 1, dtype=torch.int64)
    change.index_add_(0, windows.starts + first, torch.ones_like(windows.starts))
    change.index_add_(0, windows.starts + windows.length, -torch.ones_like(windows.starts))
    return change.cumsum(0)[:-1] > 0
