"""Runs torch's trackers in a process of their own: memory that other tests measure changes behind them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


@pytest.fixture(scope="session")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A fork, which has imported torch already."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork"), initializer=_begin) as pool:
        yield pool


def _begin() -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)  # threads of the parent are not there
