"""Varuna: every depth of the pipeline and every size of micro-batches, each by a simulation of Varuna's schedule.

A depth leaves the GPUs idle that it does not need: as many replicas as fit on the GPUs and divide the batch. Of the
cuts between layers those are taken whose slowest stage is least, so layers need not divide by the depth; every pass is
recomputed (Athlur et al. 2022, arXiv 2111.04007, section 4). Its simulator plays the schedule with the durations of
passes, transfers and sums of gradients; here the engine does, on `pipeline/varuna`.

On a profile it does what the released `auto_config.py` and its simulator do (microsoft/varuna): depths are proper
divisors of the number of sections between cut-points, micro-batches the largest that fit, and replicas need not divide
the batch, whose rest is left out. Jitter of the simulator, a few milliseconds a pass and a message whatever they take,
is left out, and so are depths whose smallest micro-batch does not fit.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.ordered_stages import partition_stages
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.pricing.job import JobProblem, require_job
from meshcast.experiments.planning.pricing.stage_prices import range_totals
from meshcast.experiments.planning.problem import Changes, Problem, SearchBudget, Settings, settings_of
from meshcast.experiments.planning.stages import StageOption
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineShape
from meshcast.simulator.schemes.pipeline.varuna import Varuna

MICROSECOND = 1e-6
MESSAGES = 4
"""Messages that a stage of the released simulator sends at once."""


class VarunaPlanner(Planner):
    paper = Paper("arXiv:2111.04007", "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", 2021)
    restrictions = ("shard tensors", "cut a layer", "keep activations other than the inputs of stages")
    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        if problem.mode == "paper":
            return self._plan_profile(problem)
        job = require_job(problem)
        plans = [*self._space(job)]
        seconds = [job.step_seconds(plan) for plan in takewhile(lambda _: not is_over(), plans)]
        best = min(seconds, default=math.inf)
        if not math.isfinite(best):
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory: Varuna shards no tensors")
        proof = PlanProof(best, best, "simulation of every plan") if len(seconds) == len(plans) else None
        return Proposal(plans[seconds.index(best)], best, len(seconds), proof)

    def _space(self, job: JobProblem) -> Iterator[Changes]:
        """Yields all depths and sizes; the batch stays. Depths that use most GPUs come first. Clusters of several kinds
        of nodes, and those of a file, are used whole."""
        layers, sizes = int(job.job.model.layers), list_divisors(job.sequences)
        depths = range(1, min(layers, job.gpus) + 1)
        used = {depth: depth * max(size for size in sizes if size <= job.gpus // depth) for depth in depths}
        works: list[np.ndarray] = []
        for depth in sorted(depths, key=lambda depth: -used[depth]):
            replicas = used[depth] // depth
            if used[depth] < job.gpus and not job.resizable:
                continue
            pipeline: dict[str, object] = {}
            if depth > 1:
                works = works or [self._price_layers(job, again) for again in ("full", "none")]
                partition = partition_stages([works[0]] * (depth - 1) + works[1:])
                assert partition is not None
                pipeline = {"pp": depth, "schedule": "varuna", "partition": [*partition.layers]}
            plan = {"dp": replicas, "tp": 1, **pipeline, "recompute": "full"}
            for micro in list_divisors(job.sequences // replicas):
                batch = {"global": job.sequences, "micro": micro}
                yield {"plan": plan, "batch": batch, **job.resize(used[depth])}

    def _price_layers(self, job: JobProblem, again: str) -> np.ndarray:
        """Returns the seconds of ranges of layers, with the ends of the model, on a GPU [layers, layers]."""
        units = job.units_of(StageOption(1, {"tp": 1, "dp": 1, "recompute": again}))
        return range_totals(units.forward + units.backward)

    # ---------------------------------------------------------------------------------------- profiles

    def _plan_profile(self, problem: Problem) -> Proposal:
        settings = settings_of(problem)
        if not settings.keys() >= PROFILE:
            rule = f"Varuna needs {', '.join(sorted(PROFILE))} of the sections between cut-points"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile with them")
        profile = CutPointProfile(settings, problem.gpus, problem.memory)
        plans = [plan for depth in profile.depths() if (plan := profile.plan(depth)) is not None]
        if not plans:
            raise self.nothing_fits(problem, "Give more GPUs, or GPUs of more memory")
        best = min(plans, key=lambda plan: plan.seconds)
        stated = {"depth": best.depth, "replicas": best.replicas, "micro": best.micro}
        proof = PlanProof(best.seconds, best.seconds, "simulation of every depth")
        return Proposal(stated, best.seconds, len(plans), proof, "stages are sections between cut-points of a profile")


PROFILE = frozenset({"batch", "gpus_per_node", "forward", "backward", "peak", "outputs", "send", "long_send", "sums"})
"""Settings of a profile: `batch`, `gpus_per_node`; by section and size of micro-batches, from 1: `forward` and
`backward` passes [us], `peak` memory and, of that, `outputs` [bytes]; by size: a message inside a node, `send`, and
between nodes, `long_send` [us]; by depth: the sums of gradients of 1, 2 ... replicas, `sums` [us]."""


class CutPointPlan(NamedTuple):
    """A depth with its replicas, sequences of a micro-batch, and seconds of a step [s]."""

    depth: int
    replicas: int
    micro: int
    seconds: float


class CutPointProfile:
    """A profile of the sections between cut-points, on some GPUs of some memory. settings: see `PROFILE`."""

    def __init__(self, settings: Settings, gpus: int, memory: float) -> None:
        self.settings, self.gpus, self.memory = settings, gpus, memory
        self.sections = len(settings["forward"])

    def depths(self) -> list[int]:
        """Returns the depths that the released program tries."""
        return [depth for depth in list_divisors(self.sections)[:-1] if depth <= self.gpus]

    def plan(self, depth: int) -> CutPointPlan | None:
        """Returns the plan of a depth with the largest micro-batches that fit; None: none fits."""
        stages = np.split(np.arange(self.sections), depth)
        peak, outputs = (np.array(self.settings[name], float) for name in ("peak", "outputs"))
        need = [(peak - outputs)[stage].sum(axis=0) + outputs[stage[-1]] for stage in stages]
        fitting = np.flatnonzero(np.max(need, axis=0) <= self.memory)
        if not len(fitting):
            return None
        place, replicas = int(fitting[-1]), self.gpus // depth
        passes = (np.array(self.settings[name], float)[:, place] for name in ("forward", "backward"))
        forward, backward = ([int(seconds[stage].sum()) for stage in stages] for seconds in passes)
        near, far = (self.settings[name][place] for name in ("send", "long_send"))
        inside = self.settings["gpus_per_node"]
        messages = [near if stage // inside == (stage + 1) // inside else far for stage in range(depth - 1)]
        count = math.ceil(self.settings["batch"] // replicas / (place + 1))
        step = VarunaSimulation(forward, backward, messages, count).run() + self._sum_gradients(depth, replicas)
        return CutPointPlan(depth, replicas, place + 1, int(step) * MICROSECOND)

    def _sum_gradients(self, depth: int, replicas: int) -> float:
        """Returns the time of a sum of gradients [us]; of more replicas than are known as the released program does."""
        known = self.settings["sums"].get(depth, ())
        if replicas < 2 or len(known) < 2:
            return 0.0
        if replicas <= len(known):
            return float(known[replicas - 1])
        below = 2 ** int(math.log2(replicas))
        return float(known[below - 1]) if below <= len(known) else float(known[1]) * math.log2(replicas)


class VarunaSimulation:
    """The released simulator: static orders of Varuna, in which a forward pass goes ahead of a recomputation whose
    gradient has not arrived.

    forward, backward: of a pass of every stage. messages: from every stage to the next, and back.
    """

    def __init__(
        self, forward: Sequence[float], backward: Sequence[float], messages: Sequence[float], microbatches: int
    ) -> None:
        self.depth, self.messages = len(forward), messages
        self.seconds = [{"F": first, "R": first, "BW": last} for first, last in zip(forward, backward, strict=True)]
        orders = Varuna().orders(PipelineShape(self.depth, microbatches))
        self.orders = [deque(item for item in order if isinstance(item, Action)) for order in orders]
        self.ready = [
            {Action(stage, "F", k) for k in range(microbatches if stage == 0 else 0)} for stage in range(self.depth)
        ]
        self.busy, self.sending = [False] * self.depth, [0] * self.depth
        self.waiting: list[deque[tuple[float, Action]]] = [deque() for _ in range(self.depth)]
        self.events: list[tuple[float, int, str, Action]] = []
        self.now = 0.0

    def run(self) -> float:
        """Returns the time of the last event."""
        self._serve(0)
        while self.events:
            self.now, _, what, action = heapq.heappop(self.events)
            if what == "arrived":
                self.ready[action.stage].add(action)
            elif what == "sent":
                self.sending[action.stage] -= 1
            else:
                self._end(action)
            self._serve(action.stage)
        return self.now

    def _add(self, delay: float, what: str, action: Action) -> None:
        heapq.heappush(self.events, (self.now + delay, len(self.events), what, action))

    def _end(self, action: Action) -> None:
        """Ends a pass: the next pass of its micro-batch becomes ready here, or a message leaves."""
        stage, kind, k = action.stage, action.kind, action.microbatch
        self.busy[stage] = False
        if kind == "F" and stage < self.depth - 1:
            self.waiting[stage].append((self.messages[stage], Action(stage + 1, "F", k)))
        elif kind in "FR":
            self.ready[stage].add(Action(stage, "BW", k))
        elif stage:
            self.waiting[stage].append((self.messages[stage - 1], Action(stage - 1, "R", k)))

    def _serve(self, stage: int) -> None:
        """Begins what a stage can: the next pass of its order, and messages."""
        order = self.orders[stage]
        if not self.busy[stage] and order:
            if order[0].kind == "R" and order[0] not in self.ready[stage]:
                place = next((place for place, item in enumerate(order) if item.kind == "F"), None)
                if place is not None:
                    ahead = order[place]
                    del order[place]
                    order.appendleft(ahead)
            if order[0] in self.ready[stage]:
                action = order.popleft()
                self.busy[stage] = True
                self._add(self.seconds[stage][action.kind], "ended", action)
        while self.waiting[stage] and self.sending[stage] < MESSAGES:
            seconds, arrives = self.waiting[stage].popleft()
            self.sending[stage] += 1
            self._add(seconds, "sent", Action(stage, "F", arrives.microbatch))
            self._add(seconds, "arrived", arrives)
