"""``python -m experiments.cli``: the ``meshcast`` command without an installation, for example under torchrun."""

from meshcast.__main__ import main

main()
