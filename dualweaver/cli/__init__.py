"""`dualweaver` on the command line: each option once (`options`), then a file a command.

May import: forecaster, evaluation, forecast, planning, settings, backbones, data, errors.
"""

from dualweaver.cli.app import main

__all__ = ["main"]
