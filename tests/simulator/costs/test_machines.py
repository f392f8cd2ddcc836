"""The machines of published runs: each can be given by its GPUs, and priced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshcast.hardware import load_cluster, reach
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, Transfer

KEYS = ("gpu", "gpus", "gpus_per_node", "scale_up_domain")


def machines(runs: Path) -> list[dict[str, Any]]:
    """The different machines of the published runs, in the words of an inline cluster."""
    with runs.open(encoding="utf-8") as file:
        specs = [json.loads(line)["spec"] for line in file]
    found = [{**{key: spec[key] for key in KEYS}, "inter": dict(spec["inter"])} for spec in specs]
    for one in found:
        del one["inter"]["stated"]
    return list({json.dumps(one): one for one in found}.values())


def test_every_machine_of_the_published_runs_can_be_given_and_priced(tables: Any) -> None:
    clusters = machines(tables.published_runs)
    assert len(clusters) > (100 if tables.whole else 60) and len({cluster["gpu"] for cluster in clusters}) > 15
    for one in clusters:
        cluster = load_cluster(one)
        assert cluster.gpus == one["gpus"] and cluster.gpus_per_node == one["gpus_per_node"], one
        nulls = {"scale_up_domain": one["scale_up_domain"], **{f"inter.{key}": v for key, v in one["inter"].items()}}
        needed = one["inter"]["kind"] != "none" and cluster.scale_out.bandwidth > 0
        filled = [key for key, value in nulls.items() if value is None and (needed or not key.startswith("inter"))]
        assert [line.partition(":")[0] for line in cluster.assumed] == [f"cluster.{key}" for key in filled], one
        costs = Costs(cluster, Mesh({"dp": cluster.gpus}))
        place = reach(cluster, range(cluster.gpus))
        assert place.members == cluster.gpus and place.nodes.number == -(-cluster.gpus // cluster.local_gpus)
        if cluster.gpus > 1:
            whole = costs.estimate(Collective("all_reduce", 2**28, ("dp",)))
            pair = costs.estimate(Collective("all_reduce", 2**28, ("dp",), (0, 1)))
            message = costs.estimate(Transfer(2**28, "dp", 0, 1))
            assert message.seconds > 0 and pair.seconds > 0 and 0 < whole.seconds < 1.0, one
