"""The ``meshcast`` command, also as ``python -m meshcast``."""

from __future__ import annotations

import sys

from meshcast.packages import check_packages


def main() -> None:
    """Runs the command; a hidden package is one line and exit code 2, as for any other mistake in its use.

    Ctrl-C is exit code 130 also while modules are imported, which takes most of the time of a short command.
    """
    try:
        check_packages()
    except ImportError as error:
        print(f"meshcast: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        from experiments.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
