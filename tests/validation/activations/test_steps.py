"""Memory of a step is what torch's own trackers count of it, on the CPU among ranks of a fake group."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from tests.draws import drawn
from tests.validation.activations.apart import track
from tests.validation.activations.families import LLAMA

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RANKS = 8


def forecast(shape: dict[str, Any], scheme: str, settings: dict[str, Any], micro: int, **fields: Any) -> Report:
    """The report of torchtitan on a node of eight."""
    plan = {"mesh": {"dp": RANKS}, "schemes": [{"use": scheme, "over": "dp"}]}
    framework = {"name": "torchtitan", "set": {"compile": False, **settings}}
    job = {"model": shape, "cluster": {"node": "dgx-h100", "nodes": 1}, "framework": framework, "plan": plan}
    return simulate({**job, "batch": {"micro": micro, "global": 4 * RANKS}, **fields})


@pytest.mark.parametrize("views", [False, True])
def test_ddp_holds_gradients_twice_or_once(views: bool, apart: ProcessPoolExecutor) -> None:
    """Once where gradients are views of its buckets."""
    shape = {**LLAMA, "seq": 8}
    settings = {"update": {"gradient_buckets": not views}}
    report = forecast(shape, "data/ddp", settings, 2, precision={"compute": "fp32"})
    tracked = apart.submit(track, "track_gradients", shape, views).result()
    assert report.play.peaks[0].by["gradients"] == pytest.approx(tracked, rel=0.02)


@pytest.mark.parametrize(("layers", "seq"), drawn([(6, 8), (2, 8), (12, 8), (6, 256), (4, 64)], [(2, 8)]))
def test_the_peak_under_fsdp_is_the_tracked_one(layers: int, seq: int, apart: ProcessPoolExecutor) -> None:
    pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
    shape = {**LLAMA, "layers": layers, "seq": seq, "vocab": 512}
    composed = {"memory": {"composed": ["rms-norm", "activation", "views"]}}
    report = forecast(shape, "data/fsdp", composed, 1, batch={"micro": 1, "global": RANKS})
    peak = report.to_dict()["memory"]["stages"][0]["peak_allocated_gib"] * 2**30
    assert peak == pytest.approx(apart.submit(track, "tracked_peak", shape, RANKS).result(), rel=0.03)
