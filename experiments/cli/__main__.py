"""``python -m experiments.cli``, which torchrun needs, is ``meshcast``."""

from experiments.cli.app import main

main()
