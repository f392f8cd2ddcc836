"""The peak of a step under FSDP2 is that of torch's own tracker of it, on the CPU among ranks of a fake group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.models.load import load_model
from tests.thinning import thinned
from tests.validation.activations.families import LLAMA

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
pytestmark = pytest.mark.torch

from tests.validation.activations.layers import TABLES, Decoder  # noqa: E402

RANKS = 8
COMPOSED = ["rms-norm", "activation", "views"]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Ranks whose collectives do nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    torch.distributed.destroy_process_group()
    TABLES.clear()


def tracked_peak(shape: dict[str, Any], mesh: Any) -> int:
    """The largest sum of bytes in the second step, whose optimizer has its states."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = load_model(shape)
    TABLES[shape.seq, shape.rope_width] = torch.ones(shape.seq, shape.rope_width, dtype=torch.bfloat16)
    model = Decoder(shape)
    formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=mesh, mp_policy=formats)
    adam = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(1, shape.seq, dtype=torch.long)
    tracker = FSDPMemTracker(model, adam)
    tracker.track_inputs((ids,))
    with tracker:
        for step in range(2):
            if step:
                tracker.reset_mod_stats()
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
            adam.step()
            adam.zero_grad()
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize(("layers", "seq"), thinned([(6, 8), (2, 8), (12, 8), (6, 256), (4, 64)], [(2, 8)]))
def test_the_peak_is_the_tracked_one(layers: int, seq: int, mesh: Any) -> None:
    shape = {**LLAMA, "layers": layers, "seq": seq, "vocab": 512}
    job = {
        "model": shape,
        "cluster": {"node": "dgx-h100", "nodes": 1},
        "framework": {"name": "torchtitan", "set": {"compile": False, "memory": {"composed": COMPOSED}}},
        "batch": {"micro": 1, "global": RANKS},
        "plan": {"mesh": {"dp": RANKS}, "schemes": [{"use": "data/fsdp", "over": "dp"}]},
    }
    peak = simulate(job).to_dict()["memory"]["stages"][0]["peak_allocated_gib"] * 2**30
    assert peak == pytest.approx(tracked_peak(shape, mesh), rel=0.03)
