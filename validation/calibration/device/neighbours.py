"""Background load while a core is measured: in training all cores of a host compute, and share caches and power."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from meshcast.validation.distributed.launch import environment

SIZES = (256, 512, 1408)
"""m, k, n of the GEMMs that the processes run: operands of some MB."""


@contextmanager
def run_neighbours(count: int) -> Iterator[None]:
    """Runs `count` processes that compute GEMMs for as long as the context lasts."""
    command = [sys.executable, "-m", "meshcast.validation.calibration.device.neighbours"]
    running = [subprocess.Popen(command, env=environment("cpu")) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    """Computes GEMMs until the parent process is gone."""
    import os

    import torch

    torch.set_num_threads(1)
    m, k, n = SIZES
    x, weights = torch.ones(m, k), [torch.ones(k, n) for _ in range(16)]
    parent = os.getppid()
    while os.getppid() == parent:
        for weight in weights:
            x @ weight


if __name__ == "__main__":
    main()
