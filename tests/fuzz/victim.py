"""``meshcast`` as a process that stops itself at one of its operations on the files that it writes, for
`tests.fuzz.kills`.

``python victim.py OUT OPERATION sweep sweep.yaml ... --out OUT``: operation 0 is the begin of the command, before its
imports; the others are accesses to files whose absolute paths begin with `OUT`, counted in the process that writes
them. Without a number (``-``) it never stops.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

EVENTS = ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "fcntl.lockf")
"""Audit events before operations on files; of a lock the file is unknown, and a sweep takes only its own."""

CHUNK = 12
"""Points of a part: small, so that a sweep of a few seconds has many."""


def stop_at(operation: int, out: str) -> None:
    """Makes this process, and none that it starts, stop itself before its n-th operation on the files of `out`."""
    own, counted = os.getpid(), 0

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal counted
        if event in EVENTS and os.getpid() == own and (event == "fcntl.lockf" or str(arguments[0]).startswith(out)):
            counted += 1
            if counted == operation:
                os.kill(own, signal.SIGSTOP)

    sys.addaudithook(count)


def main() -> None:
    """Runs the command in the way of ``python -m meshcast``, with smaller parts."""
    out, operation, *words = sys.argv[1:]
    from meshcast import __main__ as command

    run = command._run

    def run_with_small_parts() -> None:
        from meshcast.experiments.runs import seeds
        from meshcast.experiments.sweeps import run as sweeps

        sweeps.CHUNK = seeds.CHUNK = CHUNK
        run()

    command._run = run_with_small_parts
    sys.argv[1:] = words
    if operation != "-":
        stop_at(int(operation), out)
        if operation == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
    command.main()


if __name__ == "__main__":
    main()
