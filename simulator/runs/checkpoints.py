"""What a checkpoint costs: its size from the states of the job, its times from the rates of hosts, network and store.

A checkpoint holds the weights that the optimizer updates and its moments: with mixed precision and Adam 12 bytes for
each trained parameter.

full: a rank gathers all states and writes them through the ports of its node.
sharded: every node writes its part; training waits.
asynchronous: training waits for the copy of every GPU into the memory of its host; the file is written meanwhile.
in-memory: every GPU copies its part into the memory of its host and of other nodes, between the messages of training
    (Gemini, Wang et al. 2023, SOSP); further asynchronous checkpoints go to the store.
just-in-time: nothing until a failure, when healthy replicas write the state of the last step (Gupta et al. 2024,
    EuroSys); further asynchronous checkpoints go to the store.
"""

from __future__ import annotations

import math

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import load
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.run_keys import Checkpoints
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.formulas import daly_interval
from meshcast.simulator.runs.span import CheckpointTier

NODE_RATE = 1e9
"""Rate at which each node writes to a store that the job does not describe [bytes/s]: 2 TB/s for the 2,048 nodes of
Llama 3 405B (arXiv 2407.21783, section 3.3.1)."""

WITHOUT_FAILURES = 3600.0
"""Time between checkpoints of a job that states neither an interval nor failures, from which the best follows
[s]."""

WRITING_SHARE = 0.1
"""Share of the time in which the store is written to, at most, by a job that does not state an interval: writing at all
times would slow down others, and training itself."""

MIN_RATE = 1e-9
"""Slower stores count as this [bytes/s]: never 0."""

MAX_STEPS = 2**40
"""More steps than any run has: checkpoints that are so far apart are never taken."""

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


@dataclass(frozen=True)
class StateSize:
    """Size of the states of training.

    nbytes: of a checkpoint.
    copies: of every state that the replicas hold; 1 where it is sharded over all of them.
    """

    nbytes: float
    copies: int


def state_size(report: Report, keys: Checkpoints) -> StateSize:
    """Returns the states of a job, and how often its ranks hold them."""
    plan, framework = report.play.plan, report.job.framework
    moments, main = _moment_bytes(report.job), framework.main_copy_bytes
    held = sum(
        state_bytes.get("optimizer", 0.0) * weight
        for state_bytes, weight in zip(report.play.resting, plan.ranks.device_weights, strict=True)
    ) * (report.job.cluster.gpus / sum(plan.ranks.device_weights))
    parameters = float(report.job.model.parameters)
    copies = 1
    if held:
        # Schemes that shard weights keep no main copy of them beside the moments.
        ratios: list[float] = [held / (parameters * each) for each in (moments + main, moments)]
        if report.job.adapters is None:
            copies = max(1, round(sorted(ratios, key=_distance_to_whole)[0]))
        else:
            parameters = held / (moments + main)
    return StateSize(parameters * saved_bytes(report.job, keys), copies)


def saved_bytes(job: Job, keys: Checkpoints) -> float:
    """Returns the size of a checkpoint for each trained parameter [bytes]."""
    return keys.bytes_per_parameter or float(BYTES[job.framework.main_weights] + _moment_bytes(job))


def _moment_bytes(job: Job) -> float:
    """Returns the bytes of what the optimizer keeps of a trained parameter in the mean beside its main weights."""
    model, framework = job.model, job.framework
    share = 1.0 if job.adapters is not None else model.every_layer_parameters() / model.parameters
    return framework.update.states.mean_bytes(framework.moments, min(share, 1.0))


def _distance_to_whole(ratio: float) -> float:
    """Returns how far a ratio is from a whole number; 1 for less than a whole copy."""
    return abs(ratio - round(ratio)) if ratio > 0.9 else 1.0


@dataclass(frozen=True)
class StoreRates:
    """Rates of a store [bytes/s]: all nodes together writing and reading, and a node alone."""

    write: float
    read: float
    node: float
    assumed: str = ""


def store_rates(cluster: Cluster, keys: Checkpoints) -> StoreRates:
    """Returns the store of a job: as it states it, that of the catalog, or an assumed store."""
    nodes, ports = cluster.nodes, cluster.scale_out.bandwidth * cluster.gpus_per_node or math.inf
    assumed = ""
    if keys.store is not None and keys.store != "none":
        store = load("stores", keys.store)
        write, read = store.rates(nodes)
        node = min(float(store.per_node or math.inf), ports)
    else:
        write = read = NODE_RATE * nodes
        node = ports
        if keys.write_gb_per_s is None:
            assumed = f"a store that takes {NODE_RATE / 1e9:g} GB/s from every node (run.checkpoints.write_gb_per_s)"
    if keys.write_gb_per_s is not None:
        write = read = keys.write_gb_per_s * 1e9
    if keys.read_gb_per_s is not None:
        read = keys.read_gb_per_s * 1e9
    factor = keys.bandwidth_factor
    write, read, node = (max(min(rate * factor, ports * nodes), MIN_RATE) for rate in (write, read, node))
    return StoreRates(min(write, node * nodes), min(read, node * nodes), min(write, node), assumed)


def make_tiers(
    keys: Checkpoints, size: StateSize, rates: StoreRates, cluster: Cluster, mtbf: float, step: float
) -> tuple[CheckpointTier, ...]:
    """Returns the checkpoints of a run, those that load fastest first.

    mtbf: mean time between failures of the job [s]; infinity without failures.
    step: mean duration of a step [s].
    Raises PlanError where a kind asks for what the plan does not have.
    """
    if keys.kind == "none":
        return ()
    part = size.nbytes / cluster.gpus
    to_host = part / cluster.host.bandwidth
    wrote, loads = size.nbytes / rates.write, size.nbytes / rates.read
    if keys.kind in ("full", "sharded", "asynchronous"):
        stall, write = {
            "full": (size.nbytes / rates.node, 0.0),
            "sharded": (wrote, 0.0),
            "asynchronous": (to_host, wrote),
        }[keys.kind]
        stall, write, loads = _replace_stated(keys, stall, write, loads)
        every = _interval(keys, stall, write, mtbf, step)
        return (CheckpointTier(every, stall, write, loads),)
    behind = CheckpointTier(_count_steps(max(keys.store_every_s, wrote), step), to_host, wrote, loads)
    if keys.kind == "just-in-time":
        if size.copies < 2:
            rule = "a checkpoint after a failure needs a second copy of every state, and the replicas shard theirs"
            remedy = (
                "Write plan.zero: 0, shard the states over a part of the replicas (plan.shard), or choose another kind"
            )
            raise PlanError("run.checkpoints.kind", rule, remedy, keys.kind)
        stall, write, loads = _replace_stated(keys, wrote, 0.0, loads)
        return CheckpointTier(0, stall, write, loads, size.copies - 1), behind
    if cluster.nodes < keys.copies:
        rule = f"{keys.copies} copies of every part need as many nodes, and the cluster has {cluster.nodes}"
        raise PlanError("run.checkpoints.copies", rule, "Choose another kind of checkpoints", keys.copies)
    network = cluster.scale_out.bandwidth
    sent = (keys.copies - 1) * part / network if keys.copies > 1 else 0.0
    fetched = size.nbytes / cluster.nodes / (network * cluster.gpus_per_node) if network else 0.0
    stall, write, loads = _replace_stated(keys, 0.0, to_host + sent, to_host + fetched)
    every = keys.every_steps or _count_steps(keys.every_s or 0.0, step)
    return CheckpointTier(every, stall, write, loads, keys.copies - 1), behind


def _replace_stated(keys: Checkpoints, stall: float, write: float, load_: float) -> tuple[float, float, float]:
    """Returns the times of a checkpoint, those that the job states in their places [s]. write: from the end of the
    stall on."""
    stall = stall if keys.stall_s is None else keys.stall_s
    write = write if keys.write_s is None else max(keys.write_s - stall, 0.0)
    return stall, write, load_ if keys.load_s is None else keys.load_s


def interval_seconds(keys: Checkpoints, stall: float, write: float, mtbf: float) -> float:
    """Returns the time between two checkpoints, as stated or the best [s]; not for `every_steps`."""
    return keys.every_s if keys.every_s is not None else best_interval(stall, write, mtbf)


def best_interval(stall: float, write: float, mtbf: float) -> float:
    """Returns the time between two checkpoints of a job that does not state it [s]: Daly's, unless writing would take
    too much."""
    best = daly_interval(stall, mtbf) if math.isfinite(mtbf) else WITHOUT_FAILURES
    return max(best, write / WRITING_SHARE)


def _interval(keys: Checkpoints, stall: float, write: float, mtbf: float, step: float) -> int:
    if keys.every_steps is not None:
        return keys.every_steps
    return max(1, round(min(interval_seconds(keys, stall, write, mtbf) / step, MAX_STEPS)))


def _count_steps(seconds: float, step: float) -> int:
    """Steps that take so long, at least 1."""
    return max(1, math.ceil(min(seconds / step, MAX_STEPS)))
