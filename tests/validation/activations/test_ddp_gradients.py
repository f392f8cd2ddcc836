"""DDP holds every gradient twice, or once where gradients are views of its buckets, as torch's own tracker counts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from meshcast.simulator import simulate
from tests.validation.activations.families import LLAMA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from tests.validation.activations.tracked import track_gradients  # noqa: E402

SHAPE = {**LLAMA, "seq": 8}


@pytest.mark.parametrize("views", [False, True])
def test_gradients_are_held_twice_or_once(views: bool, apart: ProcessPoolExecutor) -> None:
    job = {
        "model": SHAPE,
        "cluster": {"node": "dgx-h100", "nodes": 1},
        "framework": {"name": "torchtitan", "set": {"compile": False, "update": {"gradient_buckets": not views}}},
        "precision": {"compute": "fp32"},
        "batch": {"micro": 2, "global": 32},
        "plan": {"mesh": {"dp": 8}, "schemes": [{"use": "data/ddp", "over": "dp"}]},
    }
    forecast = simulate(job).play.peaks[0].by["gradients"]
    assert forecast == pytest.approx(apart.submit(track_gradients, SHAPE, views).result(), rel=0.02)
