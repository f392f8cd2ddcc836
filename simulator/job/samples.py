"""Samples of different lengths, drawn and joined to micro-batches: packed into sequences, or padded to the longest.

Padding fills micro-batches of samples of similar length up to a number of tokens, as the token-based baseline of
DynaPipe does (Jiang et al. 2024, arXiv 2311.10418), or ends them where the step is shortest, as DynaPipe itself.
Packing puts every sample into the fullest sequence that has room for it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from meshcast.hardware import Cluster
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.job.batch import Batch, MicrobatchClass, Samples
from meshcast.simulator.job.job import LongPlan, ReplicaPlan
from meshcast.simulator.job.sample_lengths import LengthSource
from meshcast.simulator.job.shortest_step import partition_samples
from meshcast.simulator.job.shorthand import family_degree, is_interleaved
from meshcast.simulator.models.flops import needed_flops
from meshcast.simulator.models.model import Model

SKEW_STEP = 0.05
"""Steps of the skew of classes of micro-batches."""

T = TypeVar("T")

GROUPED = ("hybrid-cp", "flexsp")
"""Ways to join samples in groups of different context-parallel degrees."""

MAX_JOINED = 10_000
"""Samples of a search of the shortest step, which then takes some seconds."""


@dataclass(frozen=True)
class Microbatch:
    """Samples of a micro-batch, joined.

    sequences: number of its rows.
    length: tokens of a row, padding included.
    document: tokens of the documents in a row that have as many pairs of tokens; None: each row is a document.
    tokens: those that are no padding.
    skew: pairs of tokens of the context-parallel rank that has most over the mean.
    """

    sequences: int
    length: int
    document: int | None
    tokens: float
    skew: float = 1.0


def join_samples(
    batch: Batch, plan: LongPlan, model: Model, cluster: Cluster, base: Path
) -> list[tuple[Batch, LongPlan]]:
    """Returns for every batch that is drawn the batch with classes of micro-batches and their order in place of
    samples, and the plan with those of replicas; a batch without samples as it is.

    base: folder of relative paths.
    Raises PlanError for samples that do not fit the rest of the job.
    """
    samples = batch.samples
    if samples is None:
        return [(batch, plan)]
    if model.cross_attention:  # before any FLOPs are counted of a text that is all input
        rule = f"the decoder of {model.name} attends to an encoder, which is forecast with equal sequences"
        raise PlanError("batch.samples", rule, "Leave it out")
    sequence = batch.sequence or model.seq
    _check_samples(batch, plan, samples, sequence)
    source = LengthSource.of(samples, sequence, base)
    pack = _packer_by_work(samples, sequence, plan, model) if samples.join == "wlb" else None
    drawn = []
    for seed in range(samples.seed, samples.seed + samples.batches):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(source.draw(rng), sequence).tolist()
        if samples.join in GROUPED:
            drawn.append((_assign(samples, lengths, sequence, plan, (model, cluster)), plan))
            continue
        degree = family_degree(plan, "data")
        ranks, replicas = (degree, 1) if samples.equal_replicas else (1, degree)
        if samples.join == "dp-balanced":
            micros = _pack_in_order(samples, lengths, sequence, plan)
            drawn.append(_with_classes(plan, [micros[replica::degree] for replica in range(degree)]))
            continue
        micros = pack(lengths) if pack else _join(samples, lengths, sequence, (ranks, replicas), plan, model)
        drawn.append(_with_classes(plan, _deal(micros, replicas, model, rng)))
    return drawn


def _join(
    samples: Samples, lengths: Sequence[int], sequence: int, parts: tuple[int, int], plan: LongPlan, model: Model
) -> list[Microbatch]:
    """Returns the micro-batches of samples. parts: ranks that run micro-batches of the same size at a time, and
    replicas to which they are dealt."""
    most, (ranks, replicas) = samples.tokens or sequence, parts
    if samples.join == "shortest-step":
        return _end_where_shortest(lengths, most, ranks, replicas, samples, family_degree(plan, "pipeline"), model)
    if samples.join == "packing":
        return _pack(lengths, sequence, most, ranks, samples, plan)
    return _pad(lengths, sequence, most, ranks, samples)


def _check_samples(batch: Batch, plan: LongPlan, samples: Samples, sequence: int) -> None:
    for key in ("total", "micro", "microbatches", "documents", "lengths", "order"):
        if key in batch.model_fields_set:
            name = Batch.model_fields[key].alias or key
            raise PlanError(f"batch.{name}", "it follows from batch.samples", "Leave it out", getattr(batch, key))
    if plan.replicas or plan.stages:
        where = "plan.replicas" if plan.replicas else "plan.stages"
        raise PlanError(where, "samples are dealt to replicas of equal degrees", "State batch.lengths instead")
    if samples.tokens and samples.tokens < sequence:
        rule = f"a micro-batch holds one sequence of batch.sequence = {sequence:,} tokens or more"
        raise PlanError("batch.samples.tokens", rule, "Raise it, or lower batch.sequence", samples.tokens)
    if samples.join != "packing" and sequence % samples.multiple:
        rule = f"the longest samples, of batch.sequence = {sequence:,} tokens, are padded to a multiple of it"
        fits = max(n for n in list_divisors(sequence) if n < samples.multiple)
        raise PlanError("batch.samples.multiple", rule, f"{fits} would work", samples.multiple)


def _packer_by_work(
    samples: Samples, sequence: int, plan: LongPlan, model: Model
) -> Callable[[Sequence[int]], list[Microbatch]]:
    """Returns what packs the samples of one batch after another to micro-batches of equal FLOPs (WLB-LLM)."""
    from meshcast.simulator.job.assigners.wlb import WlbPacker

    if samples.tokens is None or samples.equal_replicas:
        where = "batch.samples.equal_replicas" if samples.equal_replicas else "batch.samples.tokens"
        rule = "wlb packs micro-batches of different lengths, as long as memory allows, and deals them to replicas"
        raise PlanError(where, rule, "State tokens, above batch.sequence, and leave equal_replicas out")
    packer = WlbPacker(samples.tokens, samples.outliers, lambda n: n * needed_flops("causal", model, n))
    replicas = family_degree(plan, "data")

    def pack(lengths: Sequence[int]) -> list[Microbatch]:
        count = -(-sum(lengths) // (sequence * replicas)) * replicas
        packed = filter(None, packer.pack(lengths, count))
        return [_pack_documents(documents, sum(documents), samples, plan) for documents in packed]

    return pack


def _pack_in_order(samples: Samples, lengths: Sequence[int], sequence: int, plan: LongPlan) -> list[Microbatch]:
    """Returns packed sequences, those of all replicas in turn, as the scheduler of Megatron-Core makes them."""
    from meshcast.simulator.job.assigners.dp_balanced import pack_in_order

    replicas, stages = family_degree(plan, "data"), family_degree(plan, "pipeline")
    multiple = replicas * (stages if is_interleaved(plan) else 1)
    padded = [_round_up(length, samples.multiple) for length in lengths]
    packed = pack_in_order(padded, samples.tokens or sequence, multiple)
    if len(packed) % multiple:
        rule = f"the samples make {len(packed)} sequences, and the plan needs a multiple of {multiple}"
        raise PlanError("batch.samples", rule, "Draw more samples, or lower dp")
    # Padding of a sample is packed with it.
    share = sum(lengths) / sum(padded)
    return [_pack_documents(documents, sum(documents) * share, samples, plan) for documents in packed]


def _pack_documents(documents: Sequence[int], tokens: float, samples: Samples, plan: LongPlan) -> Microbatch:
    """Returns the micro-batch of a single sequence of documents, padded to two equal parts for each context-parallel
    rank, which its tensor-parallel ranks divide. tokens: those that are no padding."""
    total, parts = sum(documents), family_degree(plan, "sequence")
    grain = int(np.lcm(samples.multiple, (2 * parts if parts > 1 else 1) * family_degree(plan, "tensor")))
    pairs = _round_up(round(sum(length * length for length in documents) / total), samples.multiple)
    padded = _round_up(total, grain)
    if len(documents) == 1 or samples.across_samples or pairs >= padded:
        return Microbatch(1, padded, None, tokens)
    return Microbatch(1, padded, pairs, tokens, _find_skew([documents], padded, plan))


def _find_skew(rows: Sequence[Sequence[int]], length: int, plan: LongPlan) -> float:
    """Returns the pairs of tokens of the context-parallel rank that has most over their mean, where ranks divide rows
    of documents as a whole: each has a part of 2p from the start and the matching part from the end. In steps of
    `SKEW_STEP`, so that there are few classes.

    length: tokens of a row, padding behind its documents included.
    """
    sharded = [entry for entry in plan.schemes if (entry.model_extra or {}).get("sharding") == "sequence"]
    parts = 2 * family_degree(plan, "sequence")
    if not sharded or parts == 2:
        return 1.0
    pairs = np.zeros(parts)
    for documents in rows:
        ends = np.cumsum(documents)
        borders = np.linspace(0, length, parts + 1)
        into = np.clip(borders[:, None] - (ends - documents), 0, documents)  # tokens of each document before a border
        pairs += np.diff((into * into).sum(axis=1))
    ranks = pairs[: parts // 2] + pairs[: parts // 2 - 1 : -1]
    return max(1.0, round(round(float(ranks.max() / ranks.mean()) / SKEW_STEP) * SKEW_STEP, 2))


def _assign(
    samples: Samples, lengths: Sequence[int], sequence: int, plan: LongPlan, runs: tuple[Model, Cluster]
) -> Batch:
    """Returns the batch of samples in groups of different context-parallel degrees. runs: the model and what it runs
    on."""
    from meshcast.simulator.job.assigners.flexsp import assign_flexibly
    from meshcast.simulator.job.assigners.groups import batch_of_rounds
    from meshcast.simulator.job.assigners.hybrid_cp import assign_hybrid
    from meshcast.simulator.job.assigners.sample_seconds import SampleSeconds

    usual = family_degree(plan, "sequence")
    ranks = family_degree(plan, "data") * usual
    if ranks & (ranks - 1):
        rule = f"groups double from 1 to all dp x cp = {ranks} ranks"
        raise PlanError("batch.samples.join", rule, "Use a power of 2 of them", samples.join)
    rank_tokens = samples.rank_tokens or -(-sequence // usual)
    padded = [_round_up(length, samples.multiple) for length in lengths]
    largest = min(samples.largest_group or ranks, ranks) if samples.join == "flexsp" else ranks
    if max(padded) > largest * rank_tokens:
        rule = f"{largest} of the dp x cp = {ranks} ranks hold the longest sample, of {max(padded):,} tokens"
        remedy = f"{-(-max(padded) // largest):,} would work"
        raise PlanError("batch.samples.rank_tokens", rule, remedy, rank_tokens)
    tensor = family_degree(plan, "tensor")
    if samples.join == "hybrid-cp":
        rounds = assign_hybrid(padded, rank_tokens, ranks)
    else:
        rounds = assign_flexibly(padded, rank_tokens, (ranks, largest), cache(SampleSeconds(*runs, tensor)))
    if not rounds:
        rule = f"no groups of up to {largest} ranks hold the samples of a micro-batch, at least one in each"
        raise PlanError("batch.samples.rank_tokens", rule, "Raise it, or draw more samples", rank_tokens)
    return batch_of_rounds(rounds, lengths, samples.multiple, tensor)


def _chunk(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _pad(lengths: Sequence[int], sequence: int, most: int, ranks: int, samples: Samples) -> list[Microbatch]:
    """Returns micro-batches of samples of similar length, from the longest to the shortest, of at most `most` padded
    tokens.

    ranks: that run micro-batches of the same size at a time.
    """
    left, micros = sorted(lengths, reverse=True), []
    while left:
        length = _round_up(left[0], samples.multiple)
        rows = ranks * max(1, most // length)
        joined, left = left[:rows], left[rows:]
        micros.append(Microbatch(-(-len(joined) // ranks), length, None, sum(joined) / ranks))
    return micros


def _end_where_shortest(
    lengths: Sequence[int], most: int, ranks: int, replicas: int, samples: Samples, stages: int, model: Model
) -> list[Microbatch]:
    """Returns micro-batches of samples of similar length, of at most `most` padded tokens, for the shortest step."""
    if len(lengths) > MAX_JOINED:
        rule = f"of at most {MAX_JOINED:,} samples the micro-batches of the shortest step are searched"
        raise PlanError("batch.samples.count", rule, "Lower it, or use join: padding", len(lengths))

    def seconds(rows: int, length: int) -> float:
        return (rows * length + samples.half_rate_tokens) * needed_flops("causal", model, length)

    falling = sorted(lengths, reverse=True)
    padded = [_round_up(length, samples.multiple) for length in falling]
    micros = []
    for part in partition_samples(padded, most, stages, replicas, ranks, seconds):
        tokens = sum(falling[i] for i in part) / ranks
        micros.append(Microbatch(-(-len(part) // ranks), padded[part.start], None, tokens))
    return micros


def _pack(
    lengths: Sequence[int], sequence: int, most: int, ranks: int, samples: Samples, plan: LongPlan
) -> list[Microbatch]:
    """Returns micro-batches of sequences that are filled with samples, each in the fullest that has room for it.

    ranks: that run micro-batches of the same size at a time, as long as that with most pairs of tokens.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens that are left of a row, and its number
    for length in lengths:
        at = bisect_left(room, (length, -1))
        free, row = room.pop(at) if at < len(room) else (sequence, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(length)
        insort(room, (free - length, row))
    micros = []
    for chunk in _chunk(rows, most // sequence * ranks):
        shares = [[length for row in chunk[rank::ranks] for length in row] for rank in range(min(ranks, len(chunk)))]
        pairs = max(round(sum(length * length for length in share) / sum(share)) for share in shares)
        document = None if samples.across_samples else min(_round_up(pairs, samples.multiple), sequence)
        skew = (
            1.0
            if document is None
            else max(_find_skew(chunk[rank::ranks], sequence, plan) for rank in range(len(shares)))
        )
        micros.append(Microbatch(-(-len(chunk) // ranks), sequence, document, sum(map(sum, shares)) / ranks, skew))
    return micros


def _deal(
    micros: Sequence[Microbatch], replicas: int, model: Model, rng: np.random.Generator
) -> list[list[Microbatch]]:
    """Deals micro-batches, those of most FLOPs first, each to the replica with the fewest; returns those of every
    replica in random order."""

    def count_flops(micro: Microbatch) -> float:
        return micro.sequences * micro.length * needed_flops("causal", model, micro.document or micro.length)

    if len(micros) < replicas:
        rule = f"the samples make {len(micros)} micro-batches, and the plan has {replicas} data-parallel ranks"
        raise PlanError("batch.samples", rule, "Draw more samples, or lower samples.tokens or dp")
    dealt: list[list[Microbatch]] = [[] for _ in range(replicas)]
    loads = np.zeros(replicas)
    for micro in sorted(micros, key=count_flops, reverse=True):
        least = int(np.argmin(loads))
        dealt[least].append(micro)
        loads[least] += count_flops(micro)
    return [[share[i] for i in rng.permutation(len(share))] for share in dealt]


def _with_classes(plan: LongPlan, orders: Sequence[Sequence[Microbatch]]) -> tuple[Batch, LongPlan]:
    """Returns a batch with a class for every size of micro-batches, and the plan with the orders of heterogeneous
    replicas."""
    tokens: dict[Microbatch, list[float]] = defaultdict(list)
    for micro in (micro for order in orders for micro in order):
        tokens[replace(micro, tokens=0)].append(micro.tokens)
    sizes = sorted(tokens, key=lambda size: (size.length, size.sequences, size.document or 0, size.skew))
    classes = tuple(
        MicrobatchClass(
            samples=size.sequences,
            sequence=size.length,
            documents=size.document,
            tokens=float(np.mean(tokens[size])),
            skew=size.skew,
        )
        for size in sizes
    )
    number = {size: i for i, size in enumerate(sizes)}
    numbers = [tuple(number[replace(micro, tokens=0)] for micro in order) for order in orders]
    if len(numbers) == 1:
        return Batch(lengths=classes, order=numbers[0]), plan
    shares = tuple(ReplicaPlan(microbatches=order) for order in numbers)
    return Batch(lengths=classes), plan.model_copy(update={"replicas": shares})
