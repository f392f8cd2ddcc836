"""How many nodes a training needs, in one call: `meshcast.size`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshcast.experiments.runs.seeds import open_simulator
from meshcast.experiments.sizing.answer import KindAnswer, OtherMfu, SizeAnswer
from meshcast.experiments.sizing.kinds import SizedNode
from meshcast.experiments.sizing.options import MOST_GPUS, SizeOptions
from meshcast.experiments.sizing.question import SizeQuestion, read_question
from meshcast.experiments.sizing.sized_cluster import Simulate, SizedCluster
from meshcast.experiments.sizing.sizer import Sizer, Watch
from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.simulator.forecast.workers import collect_garbage_rarely, count_cores


class ShownSizeAnswer(SizeAnswer):
    """A `SizeAnswer` that shows itself in notebooks as the page of ``meshcast size``."""

    def _repr_html_(self) -> str:
        from meshcast.experiments.render.terminal.forecast import to_html
        from meshcast.experiments.sizing.page import page

        return to_html(page(self))


AROUND = (0.5, 2.0, 4.0)
"""Sizes of the front beside those that were looked at, over that of the answer."""

MFU = (0.9, 1.1)
"""Factors on the model FLOPs utilization by which the answer is varied: a forecast of a known program is some 10 %
uncertain."""


def size(
    job: str | Path | SomeFields,
    *,
    tokens: float | str | None = None,
    days: float | None = None,
    budget: float | None = None,
    node: Sequence[str] = (),
    batch: str | None = None,
    most_gpus: int = MOST_GPUS,
    price: Sequence[str] = (),
    prices: str | Path | None = None,
    workers: int | None = None,
    base: str | Path | None = None,
    watch: Watch = lambda node, nodes: None,
) -> SizeAnswer:
    """Returns how many nodes of each kind a training needs, with days, money, energy and CO2.

    job: path of a job or a launch file, its mapping, the name of a model, or its config.json. Fields of the plan that
        are open, or a plan that is not stated, are searched at each size.
    tokens: to train on, as a number or as ``10T``; those of the job if None.
    days: deadline, which nine of ten simulated runs meet on the cluster of the answer.
    budget: most money, which nine of ten keep; without a deadline the answer is the fastest cluster within it.
    node: kinds of nodes, such as ``hgx-h200`` or ``p5.48xlarge``; that of the job's cluster if empty.
    batch: tokens of a step, ``16M``, or their limits, ``4M..16M``; the batch of the job if None, without one at most
        the best by a published law.
    most_gpus: GPUs of the largest cluster that is looked at.
    price: prices of a GPU and hour, ``hgx-h200=2.50``; others are list prices of the catalog. prices: YAML file of
        them.
    workers: processes that simulate runs; one for each core that this process may use if None.
    base: folder of relative paths in the job; default: its own, for a mapping the current folder.
    watch: called with the kind of node and the number of nodes before a size is looked at.

    Raises PlanError, ModelError or CatalogError for a wrong job or option, and for what is missing.
    """
    values = locals()
    options = SizeOptions.read({name: values[name] for name in SizeOptions.model_fields})
    return answer_question(read_question(job, options, base=base), options.workers, watch)


def answer_question(
    question: SizeQuestion, workers: int | None = None, watch: Watch = lambda node, nodes: None, remembers: bool = True
) -> SizeAnswer:
    """Answers a question. workers, watch: see `size`. remembers: whether plans are kept for later questions."""
    with open_simulator(workers or count_cores()) as simulator, collect_garbage_rarely():
        return ShownSizeAnswer(
            question, [_answer_kind(question, kind, simulator.run, watch, remembers) for kind in question.kinds]
        )


def _answer_kind(
    question: SizeQuestion, kind: SizedNode, simulate: Simulate, watch: Watch, remembers: bool
) -> KindAnswer:
    sizer = Sizer(question, kind, simulate, watch, remembers)
    if question.days is not None:
        chosen = sizer.find_smallest(question.days)
    else:
        assert question.budget is not None
        chosen = sizer.find_fastest_within(question.budget)
    nearest = None
    if chosen is None:
        nearest = min(sizer.planned, key=lambda cluster: cluster.rough_days, default=None)
    middle = chosen or nearest
    sensitivity: list[OtherMfu] = []
    if middle is not None:
        for factor in AROUND:
            sizer.look_at(sizer.find_size(middle.nodes * factor))
    if chosen is not None and question.days is not None:
        sensitivity = [_vary(sizer, chosen, question.days, mfu) for mfu in MFU]
    without = [c for c in sizer.seen.values() if c.lacks_memory and (middle is None or c.nodes < middle.nodes)]
    clusters = [cluster for cluster in sizer.planned if _is_shown(cluster, middle)]
    return KindAnswer(
        kind, chosen, nearest, clusters, sensitivity, max(without, key=lambda cluster: cluster.nodes, default=None)
    )


def _is_shown(cluster: SizedCluster, middle: SizedCluster | None) -> bool:
    """Returns whether a cluster is simulated for the front: those that are already, and those around the answer."""
    if cluster.is_simulated:
        return True
    return middle is not None and AROUND[0] <= cluster.nodes / middle.nodes <= AROUND[-1] and cluster.can_end()


def _vary(sizer: Sizer, chosen: SizedCluster, days: float, mfu: float) -> OtherMfu:
    """Returns the answer if steps took as long as at another MFU."""
    slower = 1 / mfu
    longer = chosen.days_at(slower)
    cost = None if chosen.sure_cost is None else chosen.sure_cost * longer / chosen.sure_days
    return OtherMfu(mfu, sizer.find_smallest(days, slower), longer, cost)
