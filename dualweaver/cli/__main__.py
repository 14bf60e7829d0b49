"""`python -m dualweaver.cli`, where no script is installed."""

from dualweaver.cli.app import main

main()
