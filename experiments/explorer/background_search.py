"""A search of the best plan in a process of its own: the page answers while it runs, and ends it at any moment."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import MeshcastError


class BackgroundSearch:
    """A search that runs.

    words: how far it is, or how it ended.
    best: the job with the best plan, once it ended; None: it did not, or none fits.
    """

    def __init__(self, job: SomeFields, folder: Path) -> None:
        self.words = "counting the plans"
        self.best: Fields | None = None
        context = multiprocessing.get_context("spawn")
        self._messages, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_search, args=(dict(job), folder, sending), daemon=True)
        with _hold_interrupts():
            self._process.start()
        sending.close()

    def poll(self) -> bool:
        """Takes what the process says; returns whether it still runs."""
        try:
            while self._messages.poll():
                self.words, self.best, runs = self._messages.recv()
                if not runs:
                    self.cancel()
                    return False
        except EOFError:
            self.words = "the search ended early"
            return False
        return True

    def cancel(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.join()


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Holds Ctrl-C back, so that a process that begins here never has it: its page ends it."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _search(job: Fields, folder: Path, messages: Connection) -> None:
    """Searches in this process, and says how far it is."""
    from meshcast.experiments.search.output.page import describe_proof
    from meshcast.experiments.search.output.progress import describe_progress
    from meshcast.experiments.search.search_job import search

    send: Callable[[object], None] = messages.send
    try:
        result = search(
            job,
            base=folder,
            workers=1,
            top=1,
            watch=lambda certificate: send((describe_progress(certificate), None, True)),
        )
    except MeshcastError as error:
        send((str(error), None, False))
        return
    best = result.best[0].job if result.best else None
    send((describe_proof(result) if best else "no plan fits", best, False))
