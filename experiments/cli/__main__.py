"""``python -m meshcast.experiments.cli``: the ``meshcast`` command without an installation, for example under torchrun;
the same as ``python -m meshcast``."""

import runpy

runpy.run_module("meshcast", run_name="__main__")
