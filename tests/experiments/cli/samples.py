"""Shared by the tests of commands: a small job, a runner of commands, an unprivileged user (whom modes restrict)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner, Result

from meshcast.experiments.cli.app import app

ROOT = Path(__file__).resolve().parents[3]

JOB = """\
model: llama3-8b
cluster: dgx-h100:2
batch: {global: 16, micro: 1, sequence: 4096}
plan: {tp: 4, pp: 2}
"""

NOBODY = 65534


def run(*words: object) -> Result:
    """Runs meshcast with these arguments."""
    return CliRunner().invoke(app, [str(word) for word in words])


@contextmanager
def unprivileged() -> Iterator[None]:
    """Runs as an unprivileged user for a while; root may read and write everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
