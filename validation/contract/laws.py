"""What holds for every scheme, as functions that say what is wrong: the tests of meshcast ask them of all of its own,
and ``meshcast check --plugins`` of those of a plug-in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType

from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.capabilities import ChangesKernels, HoldsStates
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.moe_operators import EXPERTS
from meshcast.simulator.ir.ops import Gemm, StageOps
from meshcast.simulator.ir.registry import find_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.parts import MoEShape
from meshcast.simulator.scheduling.vocabulary import STAGES, ShardsVocabulary
from meshcast.validation.contract import (
    of_data,
    of_experts,
    of_memory,
    of_overlap,
    of_pipeline,
    of_sequence,
    of_tensor,
)
from meshcast.validation.contract.closeness import is_close
from meshcast.validation.contract.composed import axes_for
from meshcast.validation.contract.measure import backward_ops, catalog_model, forget, forward_ops, make, op_fields
from meshcast.validation.contract.played import Played, copies_of
from meshcast.validation.contract.step_dataflow import step_problems

FAMILY_SETTINGS: dict[str, ModuleType] = {
    "pipeline": of_pipeline,
    "tensor": of_tensor,
    "sequence": of_sequence,
    "expert": of_experts,
    "data": of_data,
    "memory": of_memory,
}
"""The module that measures the closed forms of a family."""

ROLE_SETTINGS = {"overlap of tensor parallelism": of_overlap}
"""The same of schemes whose role needs another module than their family."""

MIXED = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "first_dense": 1}
"""Experts behind a first dense layer."""


def find_measures(kind: type[Scheme]) -> ModuleType:
    """Returns the module that measures the closed forms of a scheme."""
    return ROLE_SETTINGS.get(kind.role, FAMILY_SETTINGS[kind.family])


def closed_form_problems(use: str, setting: object, measured: Counter[str]) -> list[str]:
    """Returns the closed forms of a scheme that do not hold at a setting.

    measured: counts the quantities that were measured.
    """
    kind, problems = find_scheme(use), list[str]()
    forget()
    options = kind.Options(**dict(getattr(setting, "options", ())))
    measures = find_measures(kind).MEASURES
    for closed_form in kind(options=options).closed_forms(setting):
        name, measured[closed_form.quantity] = closed_form.quantity, measured[closed_form.quantity] + 1
        if name not in measures:
            problems.append(f"nothing measures {name}; known are {', '.join(measures)}")
            continue
        if not closed_form.where:
            problems.append(f"the closed form of {name} does not say where it is from")
        value = measures[name](setting, use)
        if not is_close(value, closed_form.value):
            problems.append(
                f"{name} is {value} in the simulation, by the closed form {closed_form.value}, at {setting}"
            )
    return problems


def offloads(use: str) -> bool:
    """Returns whether a scheme moves states off the GPU by default, which it also does on one rank."""
    scheme = find_scheme(use)()
    return isinstance(scheme, HoldsStates) and bool(scheme.offloaded_to("optimizer"))


def _lower(mesh: Mesh, schemes: Sequence[Scheme], attention: str) -> StageOps:
    model = Model(
        layers=2, hidden=32, heads=4, vocab=64, seq=16, dropout=0.1, tied=False, moe=MoEShape.model_validate(MIXED)
    )
    blocks = Architecture(model, 2, 16, 64, attention=attention)
    return Lowering(mesh, schemes, True).run(blocks.stage(range(2), True, True))


@cache
def _lower_without_schemes(attention: str) -> StageOps:
    return _lower(Mesh({"x": 1}), [], attention)


def _count_products(stage_ops: StageOps) -> Counter[tuple[str, float]]:
    """Counts GEMMs by phase and FLOPs."""
    ops = (*forward_ops(stage_ops), *backward_ops(stage_ops))
    return Counter((op.phase, op.work.flops) for op in ops if isinstance(op.work, Gemm))


def identity_problems(use: str, attention: str) -> list[str]:
    """Returns what a scheme on one rank changes of a stage without schemes, which is to be nothing.

    A scheme of memory, or one that offloads, has no axis and a different thing to do: what it keeps out of memory it
    must bring back, or do again, but the kernels of the forward pass are the same.
    """
    kind, alone = find_scheme(use), _lower_without_schemes(attention)
    view = Mesh({"x": 1}, {EXPERTS: {"edp": 1, "ep": 1}}, ["x"])
    axes = ("ep",) if kind.family == "expert" else axes_for(use, "x")
    mesh = view if kind.family == "expert" else Mesh(dict.fromkeys(axes or ["x"], 1))
    with_it = _lower(mesh, [make(use, mesh, axes)], attention)
    if kind.family == "memory" or offloads(use):
        kernels = [
            [op for op in forward_ops(stage_ops) if op.work and not op.stream.startswith("memory")]
            for stage_ops in (with_it, alone)
        ]
        if issubclass(kind, ChangesKernels):
            flops = [sum(op.work.flops for op in ops if isinstance(op.work, Gemm)) for ops in kernels]
            return [] if is_close(*flops) else [f"it has {flops[0]} FLOPs of products, without it {flops[1]}"]
        same = [op_fields(op) for op in kernels[0]] == [op_fields(op) for op in kernels[1]]
        return [] if same else ["it changes the kernels of the forward pass on a single rank"]
    if kind.family == "expert" and issubclass(kind, ChangesKernels):
        same = _count_products(with_it) == _count_products(alone)
        return [] if same else ["it changes the products of a stage on a single rank"]
    return [] if catalog_model(with_it) == catalog_model(alone) else ["it changes a stage on a single rank"]


# -------------------------------------------------------------------------------------------------------- whole steps


def pass_problems(played: Played, chunks: int) -> Iterator[str]:
    """Yields what is wrong about the passes of a step on two devices, each of which runs once. chunks: of a device."""
    schedule, shape = played.plan.schedule, played.plan.shape
    ways = schedule.directions
    stages = STAGES if isinstance(schedule, ShardsVocabulary) else ways
    if (shape.p, shape.v) != (2, chunks * stages):
        yield f"it has {shape.p} devices of {shape.v} stages, not 2 of {chunks * stages}"
    kinds = Counter(action.kind for action in played.program.timetable.actions)
    wanted = shape.stages * played.plan.passes.played_shape.m * shape.slices / ways
    if not kinds["F"] == kinds["BW"] + kinds["W"] == wanted or kinds["B"] != kinds["W"]:
        yield f"of {wanted:g} passes of every kind it runs {dict(kinds)}"


def conservation_problems(played: Played) -> Iterator[str]:
    """Yields what a step keeps of its memory, and what it computes too often or too seldom."""
    if left := [(device, peak.left) for device, peak in enumerate(played.peaks) if peak.left]:
        yield f"memory is not given back: bytes by device {left}"
    wanted = played.wanted
    backward = {"gemm": 2 * wanted["gemm"], "attention": 2.5 * wanted["attention"]}
    for phases, flops in ((("F",), wanted), (("B", "W"), backward)):
        computed = played.flops(*phases, dispatch=False)
        if not is_close(dict(computed), dict(flops), 1e-6):
            yield f"FLOPs of the passes {'+'.join(phases)} are {dict(computed)}, those of the model {dict(flops)}"


def parameter_problems(played: Played) -> Iterator[str]:
    """Yields the parameters of a step on two devices that its ranks hold more or less often than is declared. Each way
    through the devices has weights of its own."""
    plan, once = played.plan, 0.0
    for device in range(2):
        for param in played.list_held(device):
            if not is_close(held := param.size * played.ranks / copies_of(param, plan), param.total, 1e-6):
                yield f"{param.name} has {param.total} elements, and the ranks of device {device} hold {held} of them"
            once += param.total
    wanted = plan.schedule.directions * plan.model_parts.model.parameters
    if not is_close(once, wanted, 1e-6):
        yield f"devices hold {once:,.0f} parameters, the model has {wanted:,}"


def engine_problems(played: Played) -> Iterator[str]:
    """Yields how a step that SimPy played differs from that of the default engine."""
    by_matrices = play_forecast(played.plan, played.stages, played.program, engine="matrices")
    if not is_close(by_matrices.step.span, played.step.span):
        yield f"the step takes {played.step.span} s by SimPy, {by_matrices.step.span} s by the default engine"
    peaks = [[peak.total for peak in peaks] for peaks in (played.peaks, by_matrices.peaks)]
    if peaks[0] != peaks[1]:
        yield f"peaks of memory are {peaks[0]} by SimPy, {peaks[1]} by the default engine"


STEP_LAWS: dict[str, Callable[[Played, int], Iterator[str]]] = {
    "every pass is made once": pass_problems,
    "readers wait for what they read": lambda played, chunks: iter(step_problems(played)),
    "memory is given back, FLOPs are those of the model": lambda played, chunks: conservation_problems(played),
    "ranks hold every parameter as often as is declared": lambda played, chunks: parameter_problems(played),
    "engines agree": lambda played, chunks: engine_problems(played),
}
"""Laws of a whole step on two devices, with the chunks of a device."""
