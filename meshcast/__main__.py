"""The ``meshcast`` command, also as ``python -m meshcast``."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from types import FrameType

from meshcast.import_path import drop_working_directory

if __name__ == "__main__":
    drop_working_directory()

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

REPEATED = 1.0
"""Time after Ctrl-C in which another one is the same wish to end [s]."""

AGAIN = 0.1
"""Time after which a lost Ctrl-C is raised again [s]."""


def main() -> None:
    """Runs the command.

    Ctrl-C is exit code 130 without a traceback, also while modules are imported: most of the time of a short command.
    """
    interrupts = record_interrupts()
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception:
        if interrupts:  # pydantic turns a KeyboardInterrupt in a model that it builds into an error of the model
            sys.exit(INTERRUPTED)
        raise


def _run() -> None:
    gc.set_threshold(1_000_000)  # imports and forecasts leave little garbage; collecting it more often costs 5 %
    # The interpreter collects once more as it ends, all that was ever kept: a tenth to a fifth of a command's time.
    # Registered before a command runs: what that leaves for the exit is done by then.
    atexit.register(gc.freeze)
    # pydantic would look through all installed packages for plugins of its own, of which meshcast needs none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from meshcast.experiments.cli.start import main as run

    run()


def record_interrupts() -> list[float]:
    """Returns a list to which the time of every later SIGINT is added [s], before it raises KeyboardInterrupt.

    Where that is lost, as in a function that a compiler calls, it is raised again.

    One that follows another within `REPEATED` does neither: a key that is pressed twice would end a search before its
    answer, and the interpreter in the middle of its exit.
    """
    received: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not received or now - received[-1] > REPEATED:
            received.append(now)
            signal.default_int_handler(number, frame)

    def ignore_at_the_end() -> None:
        if received:  # the interpreter gives handlers back while it ends, and the signal would be the exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def raise_again(lost: sys.UnraisableHookArgs) -> None:
        if lost.exc_type is not KeyboardInterrupt or not received:
            sys.__unraisablehook__(lost)
            return
        import threading

        received[-1] -= REPEATED
        kill = getattr(signal, "pthread_kill", lambda _, number: signal.raise_signal(number))  # not on Windows
        timer = threading.Timer(AGAIN, kill, (threading.main_thread().ident, signal.SIGINT))  # wakes a wait, too
        timer.daemon = True
        timer.start()

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller handles or ignores it
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = raise_again
        atexit.register(ignore_at_the_end)
    return received


if __name__ == "__main__":
    main()
