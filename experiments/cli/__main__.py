"""``python -m experiments.cli``: the ``meshcast`` command without an installation, for example under torchrun."""

from experiments.cli.app import main

main()
