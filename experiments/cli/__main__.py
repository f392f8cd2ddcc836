"""``python -m experiments.cli``: the ``meshcast`` command without an installation, for example under torchrun."""

from meshcast.import_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()

from experiments.cli.app import main

main()
