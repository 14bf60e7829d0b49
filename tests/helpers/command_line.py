"""The command line, run inside the test's process."""

from __future__ import annotations

import pytest

from dualweaver.cli.app import main


def run(*arguments: object) -> int:
    """The exit status."""
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)
