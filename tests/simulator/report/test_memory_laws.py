"""What a plan gives up never takes more memory: laws of allocated peaks."""

import pytest

from meshcast.hardware.units import GIB
from meshcast.simulator import simulate

MODEL = {"layers": 8, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 4096}


def forecast(plan):
    batch = {"global": 32, "micro": 1, "sequence": 4096}
    return simulate({"model": MODEL, "cluster": "dgx-h100:1", "batch": batch, "plan": plan})


def peak_of(plan):
    return forecast(plan).peak_allocated


def test_the_allocator_reserves_more_than_it_allocates_and_the_context_comes_on_top():
    report = forecast({"tp": 2})
    memory = report.job.framework.memory
    assert report.peak_reserved >= memory.reserved_share * report.peak_allocated > report.peak_allocated
    assert report.peak_device == report.peak_reserved + memory.context_gib * GIB < report.usable[0]


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
