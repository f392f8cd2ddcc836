"""A GPT layer lowered under given schemes, and the violations of data flow and placement in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Fragment, Op, UnitRun
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.lowering.lower import Lowering
from meshcast.simulator.models.architecture import Architecture
from meshcast.simulator.models.model import Model
from meshcast.validation.contract.closeness import is_close
from meshcast.validation.contract.dataflow import misplaced_messages, run_problems
from meshcast.validation.contract.placement import POSITIONS, Contents, CoreWatch, attention_problems, bytes_added

SEQUENCE = 48
"""Tokens of a sequence; 2, 3 and 4 ranks divide them into two parts each."""


def lowered_layer(mesh: Mesh, schemes: Sequence[Scheme], regather: bool, attention: str) -> UnitRun:
    model = Model(layers=1, hidden=96, heads=24, kv_heads=12, vocab=64, seq=SEQUENCE, dropout=0.1)
    units = Architecture(model, 36, SEQUENCE, 64, attention=attention).stage(range(1), False, False)
    (run,) = Lowering(mesh, schemes, regather).run(units).unit_runs
    return run


def layer_problems(
    mesh: Mesh, make_schemes: Callable[[], Sequence[Scheme]], regather: bool = True, attention: str = "flash"
) -> list[str]:
    """Violations in a layer. make_schemes: new objects of the schemes, outermost first."""
    watch, schemes = CoreWatch(), make_schemes()
    run = lowered_layer(mesh, [watch, *schemes], regather, attention)
    problems = [*run_problems(run), *Contents(run.fragment, mesh).problems]
    problems += misplaced_messages(all_ops(run.fragment), mesh, schemes)
    orders = [getattr(scheme, "token_order", "") for scheme in schemes if scheme.family == "sequence"]
    order = orders[0] if len(orders) == 1 and orders[0] in POSITIONS else ""
    for core, fragment in watch.cores:
        problems += attention_problems(core, fragment, mesh, order, SEQUENCE)
    rewritten = [scheme for scheme in make_schemes() if scheme.most_axes != 0]
    if len(rewritten) < len(schemes):
        alone = lowered_layer(mesh, rewritten, regather, attention)
        added, wanted = (bytes_added(all_ops(lowered.fragment), mesh) for lowered in (run, alone))
        if not is_close(dict(added), dict(wanted), 1e-6):
            problems.append(f"{added} bytes are added, and {wanted} without the schemes that have no axes")
    return problems


def all_ops(fragment: Fragment) -> list[Op]:
    return [*fragment.forward, *fragment.backward]
