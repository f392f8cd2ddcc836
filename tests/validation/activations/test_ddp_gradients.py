"""DDP holds every gradient twice, or once where gradients are views of its buckets, as torch's own tracker counts."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.models.load import load_model
from tests.validation.activations.families import LLAMA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.distributed._tools.mem_tracker import MemTracker  # noqa: E402

from tests.validation.activations.layers import Decoder  # noqa: E402

SHAPE = {**LLAMA, "seq": 8}


def track_gradients(views: bool) -> int:
    """Bytes that a backward pass of one rank leaves beside the parameters."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = Decoder(load_model(SHAPE))
        ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        tracker = MemTracker()
        tracker.track_external(model)
        ids = torch.zeros(1, 8, dtype=torch.long)
        with tracker:
            ddp(ids).sum().backward()
            held: dict[Any, int] = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    finally:
        torch.distributed.destroy_process_group()
    return held["Total"] - sum(param.untyped_storage().nbytes() for param in model.parameters())


@pytest.mark.parametrize("views", [False, True])
def test_gradients_are_held_twice_or_once(views: bool) -> None:
    job = {
        "model": SHAPE,
        "cluster": {"node": "dgx-h100", "nodes": 1},
        "framework": {"name": "torchtitan", "set": {"compile": False, "update": {"gradient_buckets": not views}}},
        "precision": {"compute": "fp32"},
        "batch": {"micro": 2, "global": 32},
        "plan": {"mesh": {"dp": 8}, "schemes": [{"use": "data/ddp", "over": "dp"}]},
    }
    forecast = simulate(job).play.peaks[0].by["gradients"]
    assert forecast == pytest.approx(track_gradients(views), rel=0.02)
