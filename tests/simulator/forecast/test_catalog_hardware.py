"""A small job on every node and cluster of the catalog: it can be forecast, and says what its calibration borrowed."""

import pytest

from meshcast.hardware import clusters, load, load_cluster, nodes
from meshcast.simulator import load_job, simulate
from meshcast.simulator.costs.calibration.calibration import Calibration
from tests.draws import drawn


def answer(cluster, gpus, **plan):
    """The answer of a small job in a format that all `gpus` know."""
    precision = next(kind for kind in ("bf16", "fp16") if all(kind in gpu.peak for gpu in gpus))
    job = {"model": "gpt2-124m", "cluster": cluster, "precision": precision, "plan": plan}
    return simulate(load_job({**job, "batch": {"micro": 1, "sequence": 256}})).to_dict()


@pytest.mark.parametrize("name", drawn(nodes(), keep=8))
def test_a_job_on_every_node(name):
    node = load("nodes", name)
    forecast = answer(f"{name}:{2 if node.nics else 1}", [node.gpu])
    low, high = forecast["interval_90_s"]
    assert 0 < low < forecast["step_time_s"] < high < 20 * low
    kinds = Calibration.shipped().sections(node.gpu.name)
    lent = [f"rates of {kind} kernels of {node.gpu.name}" for kind in ("gemm", "attention") if kind not in kinds]
    if node.gpu.architecture != "cpu":
        assert all(any(text.startswith(words) for text in forecast["assumed"]) for words in lent)
    if node.nics and node.nics.link.family == "ethernet":
        borrowed = f"rates of {node.nics.link.name}: as shares of its ports' rate, those measured on InfiniBand"
        assert borrowed in forecast["assumed"]


@pytest.mark.parametrize("name", drawn(clusters(), keep=3))
def test_a_job_on_every_cluster(name):
    cluster = load_cluster(name)
    gpus = [group.node.gpu for group in cluster.groups] or [cluster.gpu]
    forecast = answer(name, gpus, pp=2)
    assert forecast["step_time_s"] > 0 and forecast["interval_90_s"][0] > 0
    if len({gpu.name for gpu in gpus}) > 1:
        assert any("as slow as the slowest" in text for text in forecast["assumed"])


FAR = [name for name in clusters() if any(level.link for level in load_cluster(name).fabric.levels)]


@pytest.mark.parametrize("name", FAR)
def test_a_link_between_regions_costs_time(name):
    """Gradients of one replica group cross it; without it, and with all nodes in one place, the step is shorter."""
    cluster = load_cluster(name)
    gpus = [group.node.gpu for group in cluster.groups] or [cluster.gpu]
    near = cluster.model_copy(update={"fabric": type(cluster.fabric)()})
    there, here = (answer(one, gpus)["step_time_s"] for one in (cluster, near))
    assert there > 1.5 * here
