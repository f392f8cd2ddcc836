"""The ``meshcast`` command, also as ``python -m meshcast``."""

from __future__ import annotations

import sys

from meshcast.import_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()

from meshcast.packages import check_packages


def main() -> None:
    """Runs the command; a hidden package is one line and exit code 2, as for any other mistake in its use."""
    try:
        check_packages()
    except ImportError as error:
        print(f"meshcast: {error}", file=sys.stderr)
        sys.exit(2)
    from experiments.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
