"""The peak of a step under FSDP2 is that of torch's own tracker of it, on the CPU among ranks of a fake group."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import pytest

from meshcast.simulator import simulate
from tests.draws import drawn
from tests.validation.activations.families import LLAMA

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
pytestmark = pytest.mark.torch

from tests.validation.activations.tracked import tracked_peak  # noqa: E402

RANKS = 8
COMPOSED = ["rms-norm", "activation", "views"]


@pytest.mark.parametrize(("layers", "seq"), drawn([(6, 8), (2, 8), (12, 8), (6, 256), (4, 64)], [(2, 8)]))
def test_the_peak_is_the_tracked_one(layers: int, seq: int, apart: ProcessPoolExecutor) -> None:
    shape = {**LLAMA, "layers": layers, "seq": seq, "vocab": 512}
    job = {
        "model": shape,
        "cluster": {"node": "dgx-h100", "nodes": 1},
        "framework": {"name": "torchtitan", "set": {"compile": False, "memory": {"composed": COMPOSED}}},
        "batch": {"micro": 1, "global": RANKS},
        "plan": {"mesh": {"dp": RANKS}, "schemes": [{"use": "data/fsdp", "over": "dp"}]},
    }
    peak = simulate(job).to_dict()["memory"]["stages"][0]["peak_allocated_gib"] * 2**30
    assert peak == pytest.approx(apart.submit(tracked_peak, shape, RANKS).result(), rel=0.03)
