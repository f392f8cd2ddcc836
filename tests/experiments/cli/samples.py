"""What the tests of commands share: a small job, and a user whom modes of files bind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

JOB = """\
model: llama3-8b
cluster: dgx-h100:2
batch: {global: 16, micro: 1, sequence: 4096}
plan: {tp: 4, pp: 2}
"""

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root, who may read and write everything, is nobody for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)
