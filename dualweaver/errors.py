"""Errors that a user can act on. Each message names the culprit and what to do about it."""

from __future__ import annotations

__all__ = ["CheckpointError", "DataError", "DatasetUnavailableError", "DualWeaverError", "SettingError"]


class DualWeaverError(ValueError):
    """Base of every error that this library raises on purpose; the command line prints it as one line."""


class DataError(DualWeaverError):
    """The table handed in cannot be used as it is; names the column, entity or time stamp."""


class SettingError(DualWeaverError):
    """An argument is out of range or contradicts another; names the argument and the values it takes."""


class CheckpointError(DualWeaverError):
    """A folder of weights is missing, damaged or made for something else; names the file or tensor."""


class DatasetUnavailableError(DualWeaverError):
    """A benchmark data set is neither on disk nor reachable, or its checksum is wrong."""
