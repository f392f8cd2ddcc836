"""What a command says in a line."""

from __future__ import annotations

import sys

from meshcast.hardware.errors import to_line


def say(line: str, err: bool = False) -> None:
    """Prints a line, whatever the names in it hold. err: on stderr."""
    print(to_line(line), file=sys.stderr if err else sys.stdout, flush=True)
