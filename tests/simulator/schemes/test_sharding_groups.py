"""Sharded states in groups with copies, weights that stay, quantised traffic: bytes, memory, order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.resident_memory import resident_bytes
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.ir.ops import Memory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.schemes.data.zero_plus_plus import SCALE
from meshcast.validation.contract.measure import backward_ops, catalog_model
from meshcast.validation.contract.of_data import DataRanks, sent_across_nodes, sent_per_step, state_bytes_per_parameter
from meshcast.validation.contract.played import Ideal, play_job
from tests.simulator.schemes.small_jobs import LAYER, PSI, UNITS, data_ops, job_of, wire

# --------------------------------------------------------------------------------------------------- copies of groups


def test_hybrid_sharding_sums_shards_among_the_copies() -> None:
    """In every micro-batch, on a communicator of its own, behind the scatter of the same unit."""
    f, r, batch = 4, 2, 3
    job = job_of("data/fsdp", {"replicate": r, "shard": f}, batch, replicate="replicate")
    played = play_job(job, Ideal(links=1e7))
    weights = [2 * size for size in UNITS]
    gathers = [nbytes for operation, nbytes in wire(played) if operation == "all_gather"]
    assert gathers == [*weights, *weights[::-1]] * batch
    scatters = [nbytes for operation, nbytes in wire(played) if operation == "reduce_scatter"]
    assert scatters == [4 * size for size in UNITS[::-1]] * batch
    assert wire(played, "data-replicas") == [("all_reduce", 4 * size // f) for size in UNITS[::-1]] * batch
    axes = {op.work.axes for _, op in data_ops(played, "data-replicas")}  # type: ignore[union-attr]
    assert axes == {("replicate",)}
    scattered = [n for n, op in data_ops(played) if op.work.operation == "reduce_scatter"]  # type: ignore[union-attr]
    for one, other in zip(scattered, (n for n, _ in data_ops(played, "data-replicas")), strict=True):
        assert played.times.begin[other] >= played.times.end[one]
    assert sum(played.resting(0).values()) == pytest.approx(16 * PSI / f)


def test_groups_of_optimizer_states_sum_shards_among_the_copies_once_a_step() -> None:
    """`num_distributed_optimizer_instances` of Megatron-Core: buckets are reduce-scattered in a group of 4 ranks, and
    their shards all-reduced between 2 groups; updated weights are all-gathered in a group.
    """
    f, r, batch = 4, 2, 3
    job = job_of("data/zero-1", {"replicate": r, "shard": f}, batch, replicate="replicate")
    played = play_job(job, Ideal(links=1e7))
    moved = wire(played)
    assert [operation for operation, _ in moved] == ["all_gather"] * (len(moved) // 2) + ["reduce_scatter"] * (
        len(moved) // 2
    )
    scatters = [nbytes for operation, nbytes in moved if operation == "reduce_scatter"]
    assert sum(scatters) == 4 * PSI and sum(nbytes for _, nbytes in moved) == (4 + 2) * PSI
    assert wire(played, "data-replicas") == [("all_reduce", nbytes // f) for nbytes in scatters]
    scattered = [n for n, op in data_ops(played) if op.work.operation == "reduce_scatter"]  # type: ignore[union-attr]
    for one, other in zip(scattered, (n for n, _ in data_ops(played, "data-replicas")), strict=True):
        assert played.times.begin[other] >= played.times.end[one]
    assert sum(played.resting(0).values()) == pytest.approx((6 + 12 / f) * PSI)


def test_groups_without_overlap_sum_shards_before_the_update() -> None:
    """A hand-computed step: 4 PSI bytes are scattered in groups of 4, PSI bytes all-reduced between 2 groups, and 2 PSI
    bytes gathered, one after another."""
    setting = DataRanks(4, 1, 2, overlap=False)
    _, plan, (update,) = setting.lower_stages("data/zero-1")
    moved = [op for op in update.forward if op.stream.startswith("data")]
    whole = sum(setting.unit_elements)
    assert [(op.work.operation, op.work.nbytes) for op in moved] == [  # type: ignore[union-attr]
        ("reduce_scatter", 4 * whole),
        ("all_reduce", whole),
        ("all_gather", 2 * whole),
    ]
    assert moved[1].after == moved[:1] and plan.mesh.size(moved[1].work.axes) == 2  # type: ignore[union-attr]
    (adam,) = [op for op in update.forward if op.name == "adam"]
    assert set(moved[:2]) <= set(adam.after) and moved[2].after == update.forward[-2:-1]


@pytest.mark.parametrize(("weights", "number"), [("broadcast shards", 4), ("broadcast parameters", None)])
def test_owners_broadcast_updated_weights_one_after_another(weights: str, number: int | None) -> None:
    """The time is the sum over broadcasts of latency + bytes / bandwidth: latencies add up, bytes do not change."""
    setting = DataRanks(4, 2, options=(("weights", weights),))
    stage_ops, _, (update,) = setting.lower_stages("data/zero-1")
    assert stage_ops.ahead == []
    sent_by_owners = [op.work for op in update.forward if op.name == "broadcast params"]
    assert len(sent_by_owners) == (number or len(setting.parameter_elements))
    sizes = [work.nbytes for work in sent_by_owners]  # type: ignore[union-attr]
    assert sum(sizes) == 2 * sum(setting.unit_elements)
    if number is None:
        assert sorted(sizes) == sorted(2 * elements for elements in setting.parameter_elements)
    else:
        assert sizes == [2 * sum(setting.unit_elements) // 4] * 4


@pytest.mark.parametrize("use", ["data/fsdp", "data/mics", "data/zero-1"])
def test_one_group_is_full_sharding_and_groups_of_one_are_plain_copies(use: str) -> None:
    """The limits of hybrid sharding: the very ops of the one, the very bytes of the other."""
    full = play_job(job_of(use, {"dp": 4}, 2)).stages[0]
    alone = play_job(job_of(use, {"replicas": 1, "dp": 4}, 2, replicate="replicas")).stages[0]
    assert catalog_model(full) == catalog_model(alone)  # type: ignore[arg-type]
    batch = 1 if use == "data/fsdp" else 3
    copies = DataRanks(1, batch, 8)
    assert sent_per_step(copies, use) == pytest.approx(sent_per_step(DataRanks(8, batch), "data/ddp"))
    assert state_bytes_per_parameter(copies, use) == pytest.approx(18)


@pytest.mark.parametrize("overlap", [True, False])
def test_mics_sums_copies_behind_the_last_micro_batch(overlap: bool) -> None:
    framework = {"overlap": {"dp": overlap, "pp": True}, "bucket": {"elements": 1.0, "elements_per_rank": 0.0}}
    job = job_of("data/mics", {"replicas": 2, "dp": 4}, 3, framework, replicate="replicas")
    played = play_job(job, Ideal(links=1e7))
    sums = data_ops(played, "data-replicas")
    assert sum(op.work.nbytes for _, op in sums) == PSI  # type: ignore[union-attr]
    scattered = [n for n, op in data_ops(played) if op.work.operation == "reduce_scatter"]  # type: ignore[union-attr]
    last = scattered[-len(UNITS) :]
    firsts = [played.times.begin[n] for n, _ in sums]
    assert min(firsts) >= played.times.end[last[0]]
    if overlap:
        assert min(firsts) < played.times.end[last[-1]], "the first shards are summed beside the rest of the pass"
        assert all(op.when == "last" for _, op in sums)
    else:
        assert all(op.phase == "U" for _, op in sums)


def test_a_hierarchical_gather_goes_across_nodes_and_then_within() -> None:
    """16 ranks in two nodes: 8/16 of the weights leave a node in place of 15/16."""
    across, within = 2, 8
    job = job_of("data/mics", {"across": across, "within": within}, hierarchical=True)
    played = play_job(job, Ideal(links=1e7))
    gathers = [nbytes for operation, nbytes in wire(played) if operation == "all_gather"]
    assert gathers == [2 * size // within for size in [*UNITS, *UNITS[::-1]]]
    assert wire(played, "data-within") == [("all_gather", 2 * size) for size in [*UNITS, *UNITS[::-1]]]
    parts = [n for n, op in data_ops(played) if op.stream == "data" and op.work.operation == "all_gather"]  # type: ignore[union-attr]
    for one, other in zip(parts, played.flat.queues[0, "data-within"], strict=True):
        assert played.times.begin[other] >= played.times.end[one]
    assert all(peak.left == 0 for peak in played.peaks)


def test_sequence_ranks_share_the_shards_of_every_copy() -> None:
    schemes = [
        {"use": "data/fsdp", "over": "shard", "replicate": "replicate"},
        {"use": "sequence/all-gather", "over": "cp"},
    ]
    job = job_of("data/fsdp", {"shard": 1})
    mesh = {"replicate": 2, "shard": 2, "cp": 2}
    job |= {"cluster": {"gpu": "h100-sxm", "gpus": 8}, "batch": {"global": 8}}
    played = play_job({**job, "plan": {"mesh": mesh, "schemes": schemes}})
    axes = {(op.stream, op.work.axes) for _, op in data_ops(played)}  # type: ignore[union-attr]
    assert axes == {("data", ("shard", "cp")), ("data-replicas", ("replicate",))}
    assert sum(played.resting(0).values()) == pytest.approx(16 * PSI / 4)


def test_experts_are_cut_over_the_copies_that_they_have_in_a_group() -> None:
    """Experts that are spread over all ranks of a group have copies in other groups alone, and are summed there."""
    job = job_of("data/fsdp", {"shard": 1})
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 32}
    schemes = [
        {"use": "data/fsdp", "over": "shard", "replicate": "replicate"},
        {"use": "expert/all-to-all", "over": "ep"},
    ]
    plan = {"mesh": {"replicate": 2, "shard": 4}, "views": {"experts": {"edp": 2, "ep": 4}}, "schemes": schemes}
    job |= {"cluster": {"gpu": "h100-sxm", "gpus": 8}, "batch": {"global": 8}, "plan": plan}
    played = play_job({**job, "model": {**job["model"], "moe": moe}})
    (data,) = played.plan.family("data")
    experts = [param for param in played.list_held(0) if param.view]
    assert experts and {data.shards_at_rest("parameters", param) for param in experts} == {()}
    assert {data.reduces(param) for param in experts} == {("replicate",)}
    own, others = (sum(p.size for p in played.list_held(0) if bool(p.view) == view) for view in (True, False))
    summed = sum(op.work.nbytes for _, op in data_ops(played, "data-replicas"))  # type: ignore[union-attr]
    assert summed == 4 * (own + others // 4)
    assert sum(played.resting(0).values()) == pytest.approx(16 * own + 16 * others / 4)


# -------------------------------------------------------------------------------------------------- weights that stay


def test_weights_that_stay_are_gathered_once_a_micro_batch() -> None:
    """2 (N-1)/N M in place of 3; a whole copy besides the shards, and nothing more at any moment."""
    batch = 2
    played = play_job(job_of("data/fsdp", {"dp": 4}, batch, reshard=False))
    gathers = [nbytes for operation, nbytes in wire(played) if operation == "all_gather"]
    assert gathers == [2 * size for size in UNITS] * batch
    assert played.resting(0)["parameters"] == pytest.approx(4 * PSI / 4 + 2 * PSI)
    assert played.category_peak(0, "parameters") == 0
    usual = play_job(job_of("data/fsdp", {"dp": 4}, batch))
    assert sum(n for _, n in wire(usual)) - sum(n for _, n in wire(played)) == batch * 2 * PSI


@pytest.mark.parametrize("overlap", [True, False])
def test_zero_2_scatters_in_every_micro_batch_and_gathers_once(overlap: bool) -> None:
    """(a + 1) M' with weights and gradients of one size; only gradients on their way are whole."""
    batch, framework = 3, {"overlap": {"dp": overlap, "pp": True}}
    played = play_job(job_of("data/zero-2", {"dp": 4}, batch, framework))
    moved = wire(played)
    assert [nbytes for operation, nbytes in moved if operation == "reduce_scatter"] == [
        4 * size for size in UNITS[::-1]
    ] * batch
    gathers = wire(played, "data-returns" if overlap else "data")
    assert sum(nbytes for operation, nbytes in gathers if operation == "all_gather") == 2 * PSI
    assert played.category_peak(0, "gradients") == 2 * 4 * LAYER
    assert played.resting(0) == pytest.approx({"parameters": 2 * PSI, "gradients": PSI, "optimizer": 3 * PSI})


TABLE = {"data/ddp": 120e9, "data/zero-1": 31.4e9, "data/zero-2": 16.6e9, "data/zero-3": 1.9e9}


@pytest.mark.parametrize("use", TABLE)
@pytest.mark.parametrize("n", [1, 2, 8, 64, 1024])
def test_the_table_of_zero(use: str, n: int) -> None:
    """Bytes a parameter with 16-bit gradients: 16, 4 + 12/N, 2 + 14/N, 16/N. The sums are of 7.5e9 on 64 ranks."""
    options = {"persistence": 0} if use == "data/zero-3" else {}
    job = job_of(use, {"dp": n}, **options) | {"precision": {"gradients": "bf16"}}
    plan = resolve_plan(load_job(job))
    stages, _ = lower_stages(plan)
    (params,) = device_params(plan, stages)
    each = sum(resident_bytes(plan, params).values()) / PSI
    wanted = {"data/ddp": 16, "data/zero-1": 4 + 12 / n, "data/zero-2": 2 + 14 / n, "data/zero-3": 16 / n}
    assert each == pytest.approx(wanted[use])
    if n == 64:
        assert 7.5e9 * each == pytest.approx(TABLE[use], rel=0.02)


# ------------------------------------------------------------------------------------------------------------- ZeRO++


def halved(setting: DataRanks, **options: bool) -> float:
    """Bytes that leave a node, in units of the 16-bit weights, with hardly any scales."""
    every = {"qwz": False, "hpz": False, "qgz": False, **options, "block": 10**9}
    return (
        sent_across_nodes(replace(setting, options=tuple(every.items())), "data/zero-plus-plus") / setting.weight_bytes
    )


@pytest.mark.parametrize("across", [2, 8, 64])
def test_bytes_saved_by_each_part_of_zero_plus_plus(across: int) -> None:
    """In a ring of many ranks: 3 M; gathers halved by qwZ; backward gathers gone by hpZ; gradients to a quarter by qgZ.

    Gradients are in fp32 here, so without qgZ they are twice as large as in the paper.
    """
    setting = DataRanks(8 * across, across=across)
    ring, steps = 1 - 1 / (8 * across), 1 - 1 / across
    assert halved(setting) == pytest.approx(4 * ring)
    assert halved(setting, qwz=True) == pytest.approx((0.5 + 0.5 + 2) * ring, rel=1e-3)
    assert halved(setting, hpz=True) == pytest.approx((1 + 0 + 2) * ring)
    assert halved(setting, qwz=True, hpz=True) == pytest.approx((0.5 + 0 + 2) * ring, rel=1e-3)
    assert halved(setting, qgz=True) == pytest.approx(2 * ring + 0.25 * steps, rel=1e-2)
    every = halved(setting, qwz=True, hpz=True, qgz=True)
    assert every == pytest.approx(0.5 * ring + 0.25 * steps, rel=1e-2)
    if across == 64:
        assert every == pytest.approx(0.75, rel=0.02)


def test_gradients_are_quantised_twice_however_many_ranks() -> None:
    for mesh in ({"across": 2, "within": 2}, {"across": 4, "within": 8}):
        played = play_job(job_of("data/zero-plus-plus", mesh))
        names = [op.name for op in backward_ops(played.stages[0])]  # type: ignore[arg-type]
        assert names.count("quantise grads") == 2 * len(UNITS)
        exchanges = [op.work.axes for op in backward_ops(played.stages[0]) if op.name == "exchange grads"]  # type: ignore
        assert exchanges == [("within",), ("across",)] * len(UNITS)


def test_weights_are_dequantised_before_they_are_used() -> None:
    """The first kernel of a unit waits for the arrived weights; the quantised all-gather is half as large."""
    played = play_job(job_of("data/zero-plus-plus", {"across": 2, "within": 4}, 2), Ideal(links=1e7))
    for unit_run in played.stages[0].unit_runs:  # type: ignore[union-attr]
        kernels = [op for op in unit_run.fragment.forward if op.stream == "compute" and op.name != "quantise params"]
        assert [op.name for op in kernels[:2]] == ["dequantise params", "keep params"]
        assert isinstance(kernels[0].work, Memory)
        elements = kernels[0].work.write // 2
        assert kernels[0].work.read == elements + SCALE * -(-elements // 2048)
    backward = [op for op in backward_ops(played.stages[0]) if op.name == "gather params"]  # type: ignore[arg-type]
    assert {op.work.axes for op in backward} == {("within",)}  # type: ignore[union-attr]
    assert {op.stream for op in backward} == {"data-within"}
    assert all(peak.left == 0 for peak in played.peaks)
