"""The lowering of a plan: under its schemes, as its framework executes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcast.simulator.ir.host_calls import CallKind, PassCalls
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.lowering.lower import LoweredUnits, Lowering
from meshcast.simulator.lowering.scope import HostLaunches
from meshcast.simulator.plan.plan import Plan


def make_lowering(
    plan: Plan, units: LoweredUnits | None = None, unused_roles: Sequence[str] = (), keeps_modules: bool = False
) -> Lowering:
    """Returns the lowering under the schemes of a plan, without those whose role is idle on a stage. keeps_modules: see
    `Lowering`."""
    schemes = [scheme for scheme in plan.schemes if scheme.role not in unused_roles]
    traits = lowering_traits(plan)
    lowering = Lowering(plan.mesh, schemes, known=units, **traits._asdict())
    lowering.keeps_modules = keeps_modules
    return lowering


class LoweringTraits(NamedTuple):
    """What the lowering of a plan depends on besides its mesh and its schemes; see `Lowering`."""

    regather: bool
    fused_gradients: bool
    forward_only: bool
    accumulated: str
    host: HostLaunches


def lowering_traits(plan: Plan) -> LoweringTraits:
    """Returns what the lowering of a plan reads of its job."""
    framework = plan.job.framework
    graphed = framework.cuda_graphs if isinstance(framework.cuda_graphs, tuple) else ()
    host = HostLaunches(graphed, host_waits(plan), _count_calls(plan), _count_launches(framework))
    forward_only, accumulated = plan.job.forward_only, framework.gradients
    return LoweringTraits(framework.regather, framework.fused_gradients, forward_only, accumulated, host)


def _count_calls(plan: Plan) -> tuple[tuple[CallKind, PassCalls], ...]:
    """Returns the time of the host for each kind of ops, over that of a single op; empty where all take as long, as in
    models with experts (`Framework.calls`)."""
    kinds = plan.job.framework.calls
    if not kinds or plan.job.model.moe is not None:
        return ()
    number = kinds["op"].forward
    return tuple((kind, PassCalls(*(calls / number for calls in passes))) for kind, passes in kinds.items())


def _count_launches(framework: Framework) -> tuple[tuple[str, tuple[float, float]], ...]:
    """Returns the time of the host to launch the kernels of each operation that runs as several, forward and backward,
    over that of a single op; empty where the host launches them as a single op."""
    eager = framework.kernel_traits.eager
    if not framework.calls:
        return ()
    calls = framework.calls["op"].forward
    return tuple((what, (each.forward.kernels / calls, each.backward.kernels / calls)) for what, each in eager.items())


def host_waits(plan: Plan) -> frozenset[str]:
    """Returns the operations at which the host waits for the GPU, by the names of `Memory`.

    ``router``: it launches the kernels of experts, whose tokens none are dropped. Of packed documents it
    reads the lengths before operations whose kernels do not find them (``rope``).
    """
    job, framework = plan.job, plan.job.framework
    waits = set[str]()
    if not hidden_launch_s(framework):
        return frozenset()
    if (moe := job.model.moe) is not None:
        from meshcast.simulator.schemes.expert.shared.expert_parallel import ExpertScheme  # models without need none

        capacities = [scheme.capacity(moe) for scheme in plan.schemes if isinstance(scheme, ExpertScheme)]
        waits |= {"router"} if (capacities or [moe.capacity])[0] is None else set()
    if job.batch.documents is not None:
        waits |= {what for what, passes in framework.kernel_traits.eager.items() if passes.reads_documents}
    return frozenset(waits)
