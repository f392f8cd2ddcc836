"""A plan made ready: mesh, scheme objects, stages; and the rules that hold for a whole plan.

Every rule is a small function ``check_...`` that raises one PlanError; all are asked before any work is done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import get_args

from hardware.cluster import Cluster
from hardware.errors import PlanError, nearest
from hardware.load import validated
from simulator.engine.steady import long_enough
from simulator.frameworks import Format
from simulator.job import Job, located
from simulator.leaves import EXPERTS, QUANTISED
from simulator.mesh import Mesh
from simulator.models.blocks import Blocks
from simulator.partition import Weights, layers_of_graph
from simulator.schedule import Lasts, Schedule, Shape
from simulator.scheme import Scheme, find_scheme, scheme_names
from simulator.sites import Leaf, Stage, walk

DIM_NAMES = {
    "b": "batch.micro x data-parallel ranks",
    "s": "batch.sequence",
    "h": "model.hidden",
    "a": "model.heads (and kv_heads)",
    "f": "model.ffn",
    "v": "the padded vocabulary",
    "e": "model.moe.experts",
}

EXPERT_NAMES = {**DIM_NAMES, "f": "model.moe.expert_ffn"}
"""The same where experts are."""


MAX_CUTS = 64
"""Most places at which a policy may cut a sequence."""

MAX_PASSES = 2_000_000
"""Most passes of micro-batches through stages, forward and backward: ten or twenty seconds."""


class Plan:
    """The plan of a job, checked.

    divisible: what was found to divide for other plans; new findings are added.
    Raises PlanError for the first rule that it breaks.
    """

    def __init__(self, job: Job, divisible: set[Hashable] | None = None) -> None:
        self.job = job
        self.divisible = divisible if divisible is not None else set()
        with located(*job.origin):
            self._check(job)

    def _check(self, job: Job) -> None:
        self.mesh = self._mesh()
        self.schemes = [self._scheme(i) for i in range(len(job.plan.schemes))]
        for check in (
            check_formats,
            check_world,
            check_axes,
            check_roles,
            check_experts,
            check_batch,
            check_towers,
            check_noise,
        ):
            check(self)
        self.shape = self._shape()
        check_size(self)
        self.schedule.check(self.shape)
        self.parts = self.shape.stages // self.schedule.ways
        before = [self.schedule.before(self.shape, stage) for stage in range(self.parts)]
        self.layers = layers_of_graph(job.plan.partition, job.model, before, self.schedule.use, self._weights)
        check_divisible(self)
        self.lengths = self._lengths()

    def _weights(self) -> list[Weights]:
        """What the parts of the model cost on every stage, where the plan divides them by that."""
        from simulator.weights import weights_of

        check_divisible(self)
        return weights_of(self)

    # -------------------------------------------------------------------------------------- parts

    def _mesh(self) -> Mesh:
        """Views read the ranks of one pipeline stage again."""
        plan = self.job.plan
        pipeline = {axis for entry in plan.schemes if entry.use.startswith("pipeline/") for axis in entry.over}
        return Mesh(plan.mesh, plan.views, [axis for axis in plan.mesh if axis not in pipeline])

    def _scheme(self, i: int) -> Scheme:
        entry = self.job.plan.schemes[i]
        where = f"plan.schemes[{i}]"
        kind = find_scheme(entry.use, f"{where}.use")
        over = entry.over
        if kind.most_axes is not None and len(over) > kind.most_axes:
            most = {0: "no axis", 1: "one axis"}.get(kind.most_axes, f"at most {kind.most_axes} axes")
            rule = f"{kind.family} schemes take {most}"
            raise PlanError(f"{where}.over", rule, "Leave the others out", list(over))
        view = EXPERTS if kind.family == "expert" else ""
        axes = self.mesh.views.get(view, {}) if view else self.mesh.named
        for axis in over:
            if axis not in axes:
                place = f"plan.views.{view}" if view else "plan.mesh"
                if not axes:
                    remedy = f"Say how experts are spread: plan.views: {{experts: {{edp: ..., {axis}: ...}}}}"
                    raise PlanError(f"{where}.over", f"there is no {place}", remedy, axis)
                raise PlanError(f"{where}.over", f"no such axis in {place}", nearest(axis, axes), axis)
        told = entry.model_extra or {}
        known = ["use", "over", *kind.Options.model_fields]
        for key in told:
            if key not in known:
                raise PlanError(f"{where}.{key}", f"no such key of {entry.use}", nearest(key, known))
        options = validated(kind.Options, told, where, PlanError)
        sequence = (e.over for e in self.job.plan.schemes if e.use.startswith("sequence/"))
        beside = self.mesh.parts(axis for axes in sequence for axis in axes) if kind.family == "data" else ()
        return kind(over, options, self.mesh, self.job.framework, beside)

    def family(self, family: str) -> list[Scheme]:
        return [scheme for scheme in self.schemes if scheme.family == family]

    @cached_property
    def schedule(self) -> Schedule:
        """The pipeline; without one, plain accumulation of micro-batches."""
        found = [scheme for scheme in self.schemes if isinstance(scheme, Schedule)]
        if found:
            return found[0]
        default = find_scheme("pipeline/1f1b")((), None, self.mesh, self.job.framework)
        assert isinstance(default, Schedule)
        return default

    @property
    def inside(self) -> list[Scheme]:
        """The schemes that act within a stage, outermost first."""
        return [scheme for scheme in self.schemes if scheme.family != "pipeline"]

    @property
    def pipeline_axis(self) -> str:
        """The axis of the pipeline; empty, and of size one, where no scheme makes a pipeline."""
        return self.schedule.claims[0] if self.schedule.claims else ""

    @property
    def replicas(self) -> int:
        """Data-parallel copies: each takes its own samples."""
        return self.mesh.size(axis for scheme in self.family("data") for axis in scheme.over)

    def _shape(self) -> Shape:
        batch = self.job.batch
        assert batch.total is not None
        m = batch.total // (batch.micro * self.replicas)
        slices = max(1, len(self.schedule.slices))
        return Shape(self.mesh.size(self.pipeline_axis), m, self.schedule.chunks(), slices)

    def _lengths(self) -> tuple[int, ...]:
        """Tokens of the slices of a sequence; all, as long as the schedule waits for `settle`.

        Raises PlanError where the schedule's shares are no slices of this sequence.
        """
        shares, sequence = self.schedule.slices, self.job.batch.sequence
        assert sequence is not None
        if len(shares) != 1:
            check_slices(self)
        return tuple(round(share * sequence) for share in shares) or (sequence,)

    def settle(self, lasts: Lasts) -> None:
        """Cuts sequences where the schedule leaves that to how long slices take."""
        sequence = self.job.batch.sequence
        assert sequence is not None
        if not self.schedule.slices:
            # Multiples of what divides, no more of them than a policy can look through.
            fits = (n for n in range(self.grain, sequence + 1, self.grain) if sequence % n == 0)
            step = next(n for n in fits if sequence // n <= MAX_CUTS)
            self.lengths = self.schedule.cut(self.shape, sequence, step, lasts)
            self.shape = replace(self.shape, slices=len(self.lengths))
            self.__dict__.pop("slices", None)
            check_size(self)

    @cached_property
    def grain(self) -> int:
        """Of how many tokens every slice must be a multiple: all the ways in which ranks divide positions."""
        from simulator.lowering import Lowering

        division, found = Lowering(self.mesh, self.inside).division, 1
        for unit in self.blocks.units:
            for leaf in unit.leaves():
                found = math.lcm(found, self.mesh.size(part for part, dim in division(leaf).items() if dim == "s"))
        return found

    @cached_property
    def slices(self) -> list[Blocks]:
        """Builds the stages' sites for each slice."""
        ends = [0, *accumulate(self.lengths)]
        return [self.blocks.cut(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def every(self) -> int:
        """Of a schedule without a flush, micro-batches between two updates; else 0."""
        return 0 if self.schedule.flush else self.schedule.update_every(self.shape)

    @property
    def run(self) -> Shape:
        """What is played: one batch; without a flush as many micro-batches as show how batches follow each other."""
        return long_enough(self.shape, self.every) if self.every else self.shape

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding, padded where the framework's multiple asks for it and tp does not divide it."""
        tensor = self.mesh.size(axis for scheme in self.family("tensor") for axis in scheme.over)
        if self.job.model.vocab % tensor == 0:
            return self.job.model.vocab
        return self.job.model.padded_vocab(self.job.framework.vocab_multiple * tensor)

    @cached_property
    def blocks(self) -> Blocks:
        """Builds the stages' sites."""
        job, habits = self.job, self.job.framework
        assert job.batch.sequence is not None
        return Blocks(
            job.model,
            job.batch.micro,
            job.batch.sequence,
            self.vocab,
            self.replicas,
            habits.weights,
            habits.gradients,
            habits.attention,
            (habits.loss.forward, habits.loss.backward),
            habits.loss.kept,
            habits.quantised,
        )

    @cached_property
    def clusters(self) -> list[Cluster]:
        """For every device of the pipeline the cluster whose figures its stages run at: where its ranks all lie on one
        kind of node, as if all nodes were of that kind, else the job's, as slow as its slowest kind."""
        cluster, mesh = self.job.cluster, self.mesh
        if not cluster.groups:
            return [cluster] * self.shape.p
        strides = [(mesh.axes[axis], mesh.stride(axis)) for axis in mesh.axes if axis != self.pipeline_axis]
        within = [0]
        for size, stride in strides:
            within = [rank + i * stride for rank in within for i in range(size)]
        step = mesh.stride(self.pipeline_axis) if self.pipeline_axis else 0
        return [cluster.where([device * step + rank for rank in within]) for device in range(self.shape.p)]

    def axis_of(self, part: str, view: str = "") -> str:
        """The axis, as the plan names it, that a part of the mesh belongs to; in a view its own ones come first."""
        for wanted in (view, ""):
            for axis in self.mesh.views.get(wanted, {}) if wanted else self.mesh.named:
                if part in self.mesh.parts(axis) and (not wanted or axis in self.claimed):
                    return axis
        return part

    @cached_property
    def claimed(self) -> set[str]:
        """The axes that a scheme says something about."""
        return {axis for scheme in self.schemes for axis in scheme.claims}

    def layers_of(self, index: int) -> range:
        """The layers of one part of the model: of a virtual stage."""
        start = sum(self.layers[:index])
        return range(start, start + self.layers[index])

    def stage(self, index: int, blocks: Blocks | None = None) -> Stage:
        """The sites of one part of the model. blocks: of a slice; of whole sequences where none is given."""
        return (blocks or self.blocks).stage(self.layers_of(index), index == 0, index == self.parts - 1)

    def part(self, stage: int) -> int:
        """The part of the model that a virtual stage holds."""
        return self.schedule.part(self.shape, stage)

    def device(self, stage: int) -> int:
        """The device of the pipeline that holds a virtual stage."""
        return self.schedule.device(self.shape, stage)

    def holders(self, part: int) -> tuple[int, ...]:
        """The devices that hold a part of the model."""
        return tuple(sorted({self.device(s) for s in range(self.shape.stages) if self.part(s) == part}))


# --------------------------------------------------------------------------------------------- rules


def check_formats(plan: Plan) -> None:
    """The GPU multiplies numbers of the format that products run in."""
    gpu, habits = plan.job.cluster.gpu, plan.job.framework
    number = QUANTISED[habits.quantised].dtype if habits.quantised else habits.weights
    if habits.quantised == "mxfp8" and "fp4" not in gpu.peak and "fp8" in gpu.peak:
        rule = f"{gpu.name} multiplies no blocks of 32 with scales of their own; GPUs that do have fp4 as well"
        raise PlanError("precision.compute", rule, "Use fp8-blockwise or fp8-tensorwise", habits.quantised)
    if number not in gpu.peak:
        words = [word for word, one in QUANTISED.items() if one.dtype in gpu.peak]
        known = ", ".join([*(word for word in get_args(Format) if word in gpu.peak), *words])
        rule = f"{gpu.name} has no peak rate for products in {number}"
        raise PlanError("precision.compute", rule, f"Use one of {known}", plan.job.precision.compute)


def check_world(plan: Plan) -> None:
    """The mesh uses every GPU once."""
    gpus = plan.job.cluster.gpus
    if plan.mesh.world != gpus:
        product = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.named.items())
        rule = f"the product of the axes ({product} = {plan.mesh.world}) must be the {gpus} GPUs of the cluster"
        others = {axis: plan.mesh.world // size for axis, size in plan.mesh.named.items()}
        fits = [f"{axis} = {gpus // rest}" for axis, rest in others.items() if gpus % rest == 0]
        remedy = f"{' or '.join(fits)} would work" if fits else "Change an axis, or the number of nodes"
        raise PlanError("plan.mesh", rule, remedy, dict(plan.mesh.named))


def check_axes(plan: Plan) -> None:
    """Every axis larger than one has one scheme that says what it does."""
    owners: dict[str, str] = {}
    for scheme in plan.schemes:
        for axis in scheme.claims:
            if axis in owners:
                rule = f"{owners[axis]} and {scheme.use} both claim the axis {axis!r}"
                raise PlanError("plan.schemes", rule, "Give each scheme an axis of its own")
            owners[axis] = scheme.use
    for axis, size in plan.mesh.named.items():
        if size > 1 and axis not in owners:
            remedy = f"Add a scheme with `over: {axis}`, for example data/ddp"
            raise PlanError(f"plan.mesh.{axis}", "no scheme says what this axis does", remedy, size)


def check_batch(plan: Plan) -> None:
    """The global batch is a whole number of micro-batches for every replica."""
    batch = plan.job.batch
    assert batch.total is not None
    one = batch.micro * plan.replicas
    if batch.total % one:
        near = max(1, round(batch.total / one)) * one
        rule = f"it must be a multiple of batch.micro x data-parallel ranks = {batch.micro} x {plan.replicas} = {one}"
        raise PlanError("batch.global", rule, f"{near} would work", batch.total)


def check_towers(plan: Plan) -> None:
    """Every tower has its like part of a sequence."""
    towers, seq = plan.job.model.towers, plan.job.batch.sequence
    assert seq is not None
    if seq % towers:
        rule = f"each of the {towers} towers of {plan.job.model.name} has its like part of a sequence"
        near = max(1, round(seq / towers)) * towers
        raise PlanError("batch.sequence", rule, f"{near} would work", seq)


def check_noise(plan: Plan) -> None:
    """Steps of ranks that differ are played one by one, each from an empty to an empty pipe."""
    if plan.job.noise is not None and not plan.schedule.flush:
        rule = f"steps under noise begin and end with an empty pipe, and {plan.schedule.use} has no flush"
        raise PlanError("noise", rule, "Leave it out, or use pipeline/1f1b")


def check_size(plan: Plan) -> None:
    """Every pass of a micro-batch through a stage is played, so there is an end to how many there can be."""
    shape = plan.run
    each = 2 * shape.stages * shape.slices
    if shape.m * each > MAX_PASSES:
        most = MAX_PASSES * plan.shape.m // shape.m // each * plan.job.batch.micro * plan.replicas
        cut = f" in {shape.slices} slices" if shape.slices > 1 else ""
        rule = f"{shape.m:,} micro-batches{cut} through {shape.stages} stages are more than {MAX_PASSES:,} passes"
        raise PlanError("batch.global", rule, f"At most {most:,}, or a larger batch.micro", plan.job.batch.total)


def check_roles(plan: Plan) -> None:
    """A plan has one schedule, and one scheme that says what is recomputed: two would do it twice. What a scheme
    relies on is there."""
    for role in sorted({scheme.role for scheme in plan.schemes} - {""}):
        found = [scheme.use for scheme in plan.schemes if scheme.role == role]
        if len(found) > 1:
            raise PlanError("plan.schemes", f"a plan has one {role}", "Keep one", found)
    for scheme in plan.schemes:
        for role in scheme.relies_on:
            if not any(other.role == role for other in plan.schemes):
                found = [use for use in scheme_names() if find_scheme(use).role == role]
                rule = f"{scheme.use} needs a {role}, and the plan has none"
                raise PlanError("plan.schemes", rule, f"Add {' or '.join(found)}")


def check_experts(plan: Plan) -> None:
    """Experts are spread where the model has some."""
    if plan.mesh.views and plan.job.model.moe is None:
        rule = f"{plan.job.model.name} has no experts, so nothing is read another way"
        raise PlanError("plan.views", rule, "Leave out ep and views, or choose a model with experts")
    for name, view in plan.mesh.views.items():
        for axis in list(view)[1:]:
            if view[axis] > 1 and axis not in plan.claimed:
                remedy = f"Add {{use: expert/all-to-all, over: {axis}}}; only along the first axis experts are copied"
                raise PlanError(f"plan.views.{name}.{axis}", "no scheme says what this axis does", remedy, view[axis])


def check_divisible(plan: Plan) -> None:
    """Every dim divides by the axes that cut it, at every site."""
    from simulator.lowering import Lowering

    # The samples of all replicas divide by their number, whatever it is.
    key = (replace(plan.blocks, replicas=1), tuple(plan.mesh.views), *(scheme.alike for scheme in plan.inside))
    if key in plan.divisible:
        return
    lowering = Lowering(plan.mesh, plan.inside)

    # A tower's part of a sequence is the least that must divide.
    called = DIM_NAMES | ({"s": "batch.sequence / model.towers"} if plan.job.model.trunk else {})

    def visit(leaf: Leaf) -> None:
        parts: dict[str, int] = {}
        names: dict[str, list[str]] = {}
        for part, dim in lowering.division(leaf).items():
            parts[dim] = parts.get(dim, 1) * plan.mesh.size(part)
            if (axis := plan.axis_of(part, leaf.view)) not in names.setdefault(dim, []):
                names[dim].append(axis)
        for tensor in (*leaf.ins, *leaf.outs, *leaf.weights):
            for dim, count in parts.items():
                if tensor.has(dim) and not tensor.dims[dim].divides(count):
                    _refuse(
                        EXPERT_NAMES if leaf.view else called,
                        dim,
                        tensor.dims[dim].size // tensor.dims[dim].unit,
                        count,
                        names[dim],
                    )

    for unit in plan.blocks.units:
        walk(unit, visit)
    plan.divisible.add(key)


def check_slices(plan: Plan) -> None:
    """Every slice of a sequence is a whole number of tokens, which divides as sequences do."""
    model, sequence, grain = plan.job.model, plan.job.batch.sequence, plan.grain
    assert sequence is not None
    where = next(f"plan.schemes[{i}].slices" for i, e in enumerate(plan.job.plan.schemes) if e.use == plan.schedule.use)
    if model.trunk:
        rule = f"the trunk of {model.name} joins whole sequences of all towers"
        raise PlanError(where, rule, "Use a schedule that cuts no sequences, for example pipeline/1f1b")
    for share in plan.schedule.slices:
        tokens = share * sequence
        if abs(tokens - round(tokens)) > 1e-6 or round(tokens) % grain:
            multiple = f"a multiple of {grain} tokens" if grain > 1 else "a whole number of tokens"
            rule = f"every slice of a sequence of {sequence} is {multiple}"
            fits = [n for n in range(1, sequence // grain + 1) if sequence // grain % n == 0]
            number = min(fits, key=lambda n: abs(n - len(plan.schedule.slices)))
            raise PlanError(where, rule, f"{number} would work", f"{tokens:g} tokens")


def _refuse(called: Mapping[str, str], dim: str, units: int, parts: int, axes: Sequence[str]) -> None:
    fits = [n for n in range(1, parts + 1) if units % n == 0]
    above = next((n for n in range(parts, units + 1) if units % n == 0), None)
    axis = " x ".join(axes)
    rule = f"{called.get(dim, dim)} = {units} must divide by {axis}"
    choices = " or ".join(str(n) for n in dict.fromkeys((fits[-1], above)) if n)
    raise PlanError(f"plan.{axis}", rule, f"{axis} = {choices} would work", parts)
