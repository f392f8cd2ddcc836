"""What a plan gives up never takes more memory: laws of allocated peaks."""

import pytest

from meshcast.simulator import simulate

MODEL = {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 4096}


def peak_of(plan, framework="megatron-core"):
    batch = {"global": 32, "micro": 1, "sequence": 4096}
    job = {"model": MODEL, "cluster": "dgx-h100:1", "framework": framework, "batch": batch, "plan": plan}
    return simulate(job).peak_allocated


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_weights_that_are_sharded_take_less(schedule):
    """Weight gradients of a split pass read no weights: those gathered for the other half are not kept for them."""
    whole, sharded = (peak_of({"pp": 2, "zero": zero, "schedule": schedule}) for zero in (2, 3))
    assert sharded < whole


@pytest.mark.parametrize("scheme", ["all-gather", "ring", "ulysses"])
def test_recomputing_attention_takes_no_more(scheme):
    """Gathered keys and values are gathered again, not kept for what is computed again."""
    plan = {"tp": 2, "cp": 2, "cp_scheme": scheme}
    none, selective = (peak_of(plan | {"recompute": kind}) for kind in ("none", "selective"))
    assert selective <= none
