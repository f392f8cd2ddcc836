"""Planners on drawn instances: the values that their authors' own programs give for them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from meshcast.experiments.planning.cores.stage_dp import balance_stages, plan_stages
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.planners.autopipe import BlockSearch
from meshcast.experiments.planning.planners.nnscaler import NnScaler
from meshcast.experiments.planning.planners.slapo import SHARES, walk_grid
from meshcast.experiments.planning.planners.varuna import CutPointProfile
from meshcast.experiments.planning.problem import SearchBudget, UnknownPart
from meshcast.hardware.errors import PlanError
from tests.experiments.planning.random_tables import draw_stages

PIPER = [
    7.17686434029269,
    3.91952025959904,
    2.93775307777304,
    3.86157312623608,
    2.42926877361985,
    3.25146294001375,
    2.67871127412764,
    3.63476663166246,
    4.52011274729572,
    5.65218588946438,
    1.73649851403158,
    3.63140640399089,
    math.inf,
    3.16219102842631,
]
"""Seconds of a sample on the instances of `draw_variants`, by `algo.cpp` of msr-fiddle/piper."""

VARUNA: list[list[int]] = [
    [209111, 260149, 329643, 402086, 378725],
    [191060, 292055, 344924],
    [174895, 251059],
    [106346, 129812, 142533],
    [71500, 143669, 168181],
    [127313, 232596, 287155],
    [75151, 51784],
    [300963, 389468, 496435],
    [122054, 151367, 182477],
    [156926, 334404, 346042, 362828, 487289],
    [49709, 124649],
    [127957, 266800, 345494, 403853, 509577],
]
"""Microseconds of a step for every depth on the profiles of `draw_cut_points`, by `auto_config.py` of microsoft/varuna
with its simulator, whose jitter was set to zero."""

AUTOPIPE = [
    (148762, (5, 4, 4, 4, 3)),
    (86997, (4, 2, 2, 2, 1, 1)),
    (64989, (6, 3)),
    (109639, (4, 2, 3, 2, 2, 2)),
    (89866, (4, 5, 3, 3)),
    (112881, (4, 4, 4, 4)),
    (159637, (14, 12)),
    (97392, (6, 6, 6)),
    (94405, (5, 4, 3, 3)),
    (164503, (5, 4, 4, 4, 4, 1)),
    (156162, (13, 13)),
    (168200, (4, 4, 3, 3, 6, 2)),
    (159531, (8, 5, 5, 5)),
    (111573, (4, 4, 4, 4)),
]
"""Estimates of a step, in twice as many micro-batches as stages, and blocks of stages for the chains of `draw_blocks`,
by `Merak/cpp/autopipe.cpp` of HPDL-Group/Merak."""

ALPA = [
    11.16064,
    43.33447,
    115.278,
    12.29533,
    73.1759,
    159.1115,
    15.93165,
    63.85849,
    131.1494,
    16.87637,
    56.19369,
    133.7439,
    13.61115,
    73.28066,
]
"""Objectives of stages of seven layers on 8 GPUs (`draw_stages`), by `training_dp_2` of alpa-projects/alpa, in 32
bits."""

NNSCALER = [
    math.inf,
    45.21140265364919,
    116.72285217939191,
    math.inf,
    77.05880738070029,
    164.21338696237828,
    math.inf,
    66.18609000795946,
    134.80233220942773,
    math.inf,
    59.050553893969976,
    135.1701984786553,
    math.inf,
    77.49766331865845,
]
"""The same, by `calc_optimal_pp_plan` of microsoft/nnscaler, within its bounds of stages and of forward passes."""

SLAPO = {
    3: (24, 0.92, 8),
    5: (120, 0.67, 12),
    6: (64, 0.92, 8),
    7: (48, 0.92, 8),
    8: (32, 0.67, 7),
    11: (72, 0.84, 12),
    12: (64, 0.84, 9),
    13: (64, 0.84, 9),
    16: (80, 0.92, 8),
    17: (120, 0.5, 19),
    18: (16, 0.84, 7),
    19: (64, 0.84, 9),
}
"""By seed the batch, the share of recomputed layers and the number of runs for the grids of `draw_grid`, whose largest
batch fits, by `slapo/autotune/tune.py` of awslabs/slapo."""


class VariantProblem(UnknownPart):
    """Layers with variants, as in a profile of Piper."""

    name = "drawn"

    def __init__(self, nodes: int, gpus: int, memory: float, **settings: Any) -> None:
        self.nodes, self.gpus, self.memory, self.settings = nodes, gpus, memory, settings

    def graph(self) -> LayerGraph:
        return LayerGraph([f"n{node}" for node in range(self.nodes)], self.settings["edge_order"], {})


def draw_variants(seed: int) -> VariantProblem:
    """Draws a graph whose layers have one or two variants of up to three degrees of tensor parallelism."""
    draw = random.Random(seed)
    nodes = draw.randint(6, 9)
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    edges = [(a, b) for a, b in pairs if draw.random() < (0.9 if b == a + 1 else 0.15)]
    variants, sync = [], []
    for node in range(nodes):
        seconds, weights, kept = draw.uniform(1, 3), draw.uniform(1, 8), draw.uniform(1, 4)
        for degree in (1, 2, 4):
            if degree == 4 and draw.random() < 0.2:
                continue
            time, share = seconds / degree**0.9, weights / degree
            variants.append([node, degree, 0, time, share, kept / degree, 3 * weights / degree])
            if draw.random() < 0.8:
                again = 1.35 * seconds / degree**0.9, share, 0.3 * kept / degree, 3.2 * weights / degree
                variants.append([node, degree, 1, *again])
            extra = draw.uniform(0, 2) if degree > 1 else 0.0
            ends = [sum(edge[side] == node for edge in edges) for side in (1, 0)]
            sync.append([node, degree, [extra] * ends[0], [extra / 2] * ends[1]])
    sent = [draw.uniform(0, 3) for _ in edges]
    gpus, batch = draw.choice((4, 6, 8, 12)), draw.choice((4, 12, 24, 60))
    memory, bandwidth = draw.uniform(30, 60), draw.uniform(2, 20)
    profile = {"edge_order": edges, "edge_bytes": sent, "variants": variants, "sync": sync}
    return VariantProblem(nodes, gpus, memory, **profile, batch=batch, bandwidth=bandwidth)


@pytest.mark.parametrize("seed", range(len(PIPER)))
def test_piper_is_its_authors_program(seed: int) -> None:
    try:
        value = find_planner("piper")().plan(draw_variants(seed), SearchBudget()).value
    except PlanError:
        value = math.inf
    assert value == pytest.approx(PIPER[seed], rel=1e-12)


def draw_cut_points(seed: int) -> CutPointProfile:
    """Draws passes, memory and messages of sections, on GPUs that depths need not divide."""
    draw = random.Random(seed)
    sections, gpus, sizes = draw.choice((4, 6, 8, 12)), draw.randint(5, 40), range(1, draw.randint(2, 6) + 1)
    kinds = [(draw.uniform(300, 1500), draw.randint(20, 30), draw.uniform(2, 5)) for _ in range(sections)]
    forward = [[seconds * size * draw.uniform(0.9, 1.1) for size in sizes] for seconds, _, _ in kinds]
    memory, batch, per_node = draw.randint(900, 6000), draw.randint(40, 200), draw.choice((1, 2, 4))
    profile = {
        "batch": batch,
        "gpus_per_node": per_node,
        "forward": forward,
        "backward": [[2.1 * seconds for seconds in row] for row in forward],
        "outputs": [[size * nbytes for size in sizes] for _, nbytes, _ in kinds],
        "peak": [[200 + size * nbytes * part for size in sizes] for _, nbytes, part in kinds],
        "sums": {
            depth: [draw.randint(100, 9000) for _ in range(draw.randint(1, gpus))] for depth in range(1, sections)
        },
        "send": [draw.randint(20, 400) * size for size in sizes],
        "long_send": [draw.randint(500, 3000) * size for size in sizes],
    }
    return CutPointProfile(profile, gpus, memory)


@pytest.mark.parametrize("seed", range(len(VARUNA)))
def test_varuna_is_its_authors_program(seed: int) -> None:
    profile = draw_cut_points(seed)
    plans = [profile.plan(depth) for depth in profile.depths()]
    assert [round(1e6 * plan.seconds) for plan in plans if plan] == VARUNA[seed]


def draw_blocks(seed: int) -> BlockSearch:
    """Draws a chain of an embedding, layers and an output layer, and a number of stages."""
    draw = random.Random(seed)
    layers, depth = draw.randint(6, 24), draw.randint(2, 6)
    forward = [draw.randint(100, 300), *(draw.randint(300, 1200) for _ in range(layers)), draw.randint(500, 2500)]
    backward = [2 * seconds + draw.randint(0, 300) for seconds in forward]
    return BlockSearch(forward, backward, depth, 2 * depth)


@pytest.mark.parametrize("seed", range(len(AUTOPIPE)))
def test_autopipe_is_its_authors_program(seed: int) -> None:
    search = draw_blocks(seed)
    cut = search.run()
    assert (search.price(cut).seconds, cut) == AUTOPIPE[seed]


@pytest.mark.parametrize("seed", range(len(ALPA)))
def test_alpas_stages_are_those_of_its_authors_program(seed: int) -> None:
    table = draw_stages(seed, layers=7, gpus=4).select(lambda option: option.gpus != 3)
    plan = plan_stages(table, 8, (2, 8, 24)[seed % 3])
    assert plan is not None and plan.value == pytest.approx(ALPA[seed], rel=1e-6)


@pytest.mark.parametrize("seed", range(len(NNSCALER)))
def test_nnscalers_stages_are_those_of_its_authors_program(seed: int) -> None:
    microbatches, planner = (2, 8, 24)[seed % 3], NnScaler(degrees=(1, 2, 4))
    table = planner.narrow(draw_stages(seed, layers=7, gpus=4), 8, microbatches)
    plan = balance_stages(table, 8, microbatches, min(7, planner.most_stages(microbatches)))
    assert (plan.value if plan else math.inf) == pytest.approx(NNSCALER[seed], rel=1e-12)


def draw_grid(seed: int) -> tuple[list[int], Callable[[int, float], float]]:
    """Draws batches, and the throughput of each with a share of recomputed layers; 0 where memory does not suffice."""
    draw = random.Random(seed)
    least = draw.choice((8, 16, 32))
    batches = list(range(least, least * draw.randint(2, 5) + 1, 8))
    room, slow, knee = draw.uniform(0.3, 1.2) * batches[-1], draw.uniform(0.2, 0.4), draw.uniform(8, 60)

    def measure(batch: int, share: float) -> float:
        noise = 1 + 0.03 * random.Random(f"{seed} {batch} {share}").random()
        fits = batch * (1 - 0.8 * share) <= 0.45 * room
        return 100 * batch / (batch + knee) / (1 + slow * share) * noise if fits else 0.0

    return batches, measure


@pytest.mark.parametrize("seed", SLAPO)
def test_slapo_tunes_as_its_authors_program(seed: int) -> None:
    batches, measure = draw_grid(seed)
    best, explored = walk_grid(batches, SHARES, measure)
    assert best is not None and (best.batch, best.share, len(explored)) == SLAPO[seed]
