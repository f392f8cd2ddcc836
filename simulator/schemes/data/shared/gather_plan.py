"""Plan of the all-gathers of sharded weights: in which unit, and at which of its modules, each of them is issued.

Weights are all-gathered unit by unit, as in FSDP, or module by module, as by DeepSpeed's coordinator of parameters
(runtime/zero/partitioned_param_coordinator.py); a module is an operator with its parameters. A scheme says how far
ahead of the computation its all-gathers are (`Reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from math import inf

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import COMPUTE, Fragment, Op, Param

Reach = Callable[[Sequence[int]], Sequence[int]]
"""Takes the elements of all modules in the order of a pass. For each module: how many modules of the pass have been
asked for by the time it computes."""


@dataclass(frozen=True)
class GatheredWeights:
    """Weights that are gathered together.

    groups: axes that shard them, each with its elements.
    live: elements that take memory once gathered; weights that are also stored whole take none.
    launches: of ops of the framework, as which the host calls hooks and kernels between this all-gather and the one
        before, where it waits for kernels before it calls them.
    """

    groups: tuple[tuple[tuple[str, ...], int], ...] = ()
    live: int = 0
    launches: float = 0.0

    @property
    def elements(self) -> int:
        return sum(elements for _, elements in self.groups)


@dataclass(frozen=True)
class GatheredModule:
    """A module in a pass of a unit.

    begin, end: places of its first and last op in the list of that pass.
    """

    weights: GatheredWeights
    begin: int
    end: int


@dataclass(frozen=True)
class Gather:
    """An all-gather that a unit issues.

    issuer: the module of the unit that starts when it is issued.
    later: number of units until that which uses the weights.
    module: the module there that uses them.
    """

    issuer: int
    later: int
    module: int
    weights: GatheredWeights


@dataclass(frozen=True)
class PassGathers:
    """The all-gathers of a pass of a unit.

    now: those that it issues.
    before: weights that earlier units have asked for: of its modules, with `later` 0, and of units that follow.
    ahead: elements in memory of weights that are asked for further ahead.
    """

    now: tuple[Gather, ...]
    before: tuple[Gather, ...]
    ahead: int

    @property
    def reach(self) -> int:
        """Number of units until the last whose weights earlier units have asked for."""
        return max((gather.later for gather in self.before), default=0)


MAX_UNITS_AHEAD = 4
"""All-gathers that are asked for earlier are issued that many units before their use, which takes as long where links
or kernels are the limit; their memory counts from the time on at which they are asked for."""


def plan_pass(row: Sequence[Sequence[GatheredModule]], reach: Reach) -> list[PassGathers]:
    """Plans the all-gathers of units in the order of a pass; each unit has its modules in that order."""
    places = [(unit, module) for unit, modules in enumerate(row) for module in range(len(modules))]
    weights = [row[unit][module].weights for unit, module in places]
    starts = [0, *accumulate(len(modules) for modules in row)]
    live = [0, *accumulate(gathered.live for gathered in weights)]
    now: list[list[Gather]] = [[] for _ in row]
    before: list[list[Gather]] = [[] for _ in row]
    ahead = [0 for _ in row]
    issued = asked = 0
    for place, until in enumerate(reach([gathered.elements for gathered in weights])):
        unit, issuer = places[place]
        asked = max(asked, place + 1, min(until, len(places)))
        for other in range(issued, min(asked, starts[min(unit + MAX_UNITS_AHEAD + 1, len(row))])):
            issued = other + 1
            user, module = places[other]
            if not weights[other].groups:
                continue
            now[unit].append(Gather(issuer, user - unit, module, weights[other]))
            for between in range(unit + 1, user + 1):
                before[between].append(Gather(0, user - between, module, weights[other]))
        ahead[unit] = live[asked] - live[issued]
    return [PassGathers(tuple(a), tuple(b), c) for a, b, c in zip(now, before, ahead, strict=True)]


def whole_pass(ops: Sequence[Op], weights: GatheredWeights) -> tuple[GatheredModule, ...]:
    """Returns a unit whose weights are gathered together."""
    return (GatheredModule(weights, 0, len(ops) - 1),)


def find_modules(
    fragment: Fragment, sharded: Sequence[tuple[Param, GatheredWeights]], forward: bool, reuse: float = inf
) -> tuple[GatheredModule, ...]:
    """Returns the modules of a pass of a unit in the order of use, each for an operator, also those without weights.

    sharded: the parameters that are gathered for this pass.
    reuse: a backward pass that recomputes an operator keeps its weights for its backward pass if fewer elements are
        used in between; otherwise they are gathered twice.
    """
    ops = fragment.forward if forward else fragment.backward
    uses = _UsesInPass(ops, [param for param, _ in sharded], forward)
    owned: dict[Op, list[tuple[Param, GatheredWeights]]] = {}
    for param, weights in sharded:
        owned.setdefault(param.used, []).append((param, weights))
    operators = [
        (uses.places(every[0][0]), uses.last_gradient(every), add_up([weights for _, weights in every]))
        for every in owned.values()
    ]
    used = sorted((at, weights.elements, i) for i, (places, _, weights) in enumerate(operators) for at in places)
    starts: dict[int, list[tuple[GatheredWeights, int]]] = {begin: [] for begin in uses.begins or [0]}
    for places, ready, weights in operators:
        between = sum(elements for at, elements, _ in used if places[0] < at < places[-1])
        if len(places) > 1 and between >= reuse:
            starts.setdefault(places[0], []).append((weights, -1))
            places = places[1:]
        starts.setdefault(min(places), []).append((weights, ready))
    modules = []
    for begin, following in pairwise([*sorted(starts), len(ops)]):
        for weights, end in starts[begin] or [(GatheredWeights(), -1)]:
            modules.append(GatheredModule(weights, begin, max(following - 1 if end < 0 else end, begin)))
    return tuple(modules)


FORWARD_HOOKS, BACKWARD_HOOKS = 57.0, 63.0
"""Time of the host for what FSDP1 does around the forward and the backward pass of a unit, over that for a linear
layer: 607 and 668 of 10.6 us on an x86 (PyTorch 2.13, units of a linear layer of 32 x 32 on two ranks of the process
group ``fake``, whose collectives do nothing). No published run was used."""


def wrap_trained(
    fragment: Fragment, sharded: Sequence[tuple[Param, GatheredWeights]], forward: bool
) -> tuple[GatheredModule, ...]:
    """Returns the modules of a pass of a unit whose trained parameters are units of their own: all frozen weights,
    which are gathered for the whole pass, then each trained parameter at each of its uses.

    sharded: the parameters that are gathered for this pass.
    """
    ops = fragment.forward if forward else fragment.backward
    trained = [(param, weights) for param, weights in sharded if param.trained]
    frozen = add_up([weights for param, weights in sharded if not param.trained])
    uses = [module for module in find_modules(fragment, trained, forward, 0) if module.weights.groups]
    inner, start = [], 0
    for module in uses:
        calls = FORWARD_HOOKS if ops[module.begin].phase in "FR" else BACKWARD_HOOKS
        calls += sum(op.issued for op in ops[start : module.begin] if op.stream == COMPUTE)
        inner.append(replace(module, weights=replace(module.weights, launches=calls)))
        start = module.begin
    return (*whole_pass(ops, frozen), *inner)


class _UsesInPass:
    """Where the ops of a pass use parameters.

    place: of every op.
    kernels: places of the kernels that compute outputs or gradients of inputs.
    begins: places of the first kernels of operators.
    named: by name of a kernel, its first place.
    ends: places after which gradients of parameters are complete.
    """

    def __init__(self, ops: Sequence[Op], params: Sequence[Param], forward: bool) -> None:
        self.forward, self.last = forward, len(ops) - 1
        self.place = {op: i for i, op in enumerate(ops)}
        self.kernels = [i for i, op in enumerate(ops) if op.stream == COMPUTE and op.phase != "W"]
        self.begins = [next(same) for _, same in groupby(self.kernels, lambda i: ops[i].name)]
        self.named = {ops[i].name: i for i in reversed(self.kernels)}
        self.ends = sorted(self.place[param.ready] for param in params if param.ready in self.place)

    def places(self, param: Param) -> list[int]:
        """Returns where the operator of a parameter runs, or again and then backward."""
        if self.forward:
            return [self.place.get(param.used, 0)]
        names = f"re {param.used.name}", f"d{param.used.name}"
        if places := [self.named[name] for name in names if name in self.named]:
            return places
        # The backward pass of an operator follows that of the operator before, which ends with its weight gradients.
        end = self.place.get(param.ready, 0)
        after = max((other + 1 for other in self.ends if other < end), default=0)
        return [next((i for i in self.kernels if after <= i < end), end)]

    def last_gradient(self, params: Sequence[tuple[Param, GatheredWeights]]) -> int:
        """Returns the place after which the gradients of parameters are complete; forward -1."""
        if self.forward:
            return -1
        return max((self.place.get(param.ready, self.last) for param, _ in params), default=-1)


def join_modules(modules: Sequence[GatheredModule], elements: int) -> tuple[GatheredModule, ...]:
    """Returns neighbouring modules joined until at least so many elements are gathered together."""
    joined: list[list[GatheredModule]] = []
    for module in modules:
        if not joined or sum(module.weights.elements for module in joined[-1]) >= elements:
            joined.append([])
        joined[-1].append(module)
    return tuple(
        GatheredModule(
            add_up([module.weights for module in group]), group[0].begin, max(module.end for module in group)
        )
        for group in joined
    )


def add_up(every: Sequence[GatheredWeights]) -> GatheredWeights:
    """Adds up weights that are gathered together, with an all-gather for each set of axes."""
    groups: dict[tuple[str, ...], int] = {}
    for weights in every:
        for axes, elements in weights.groups:
            groups[axes] = groups.get(axes, 0) + elements
    return GatheredWeights(tuple(groups.items()), sum(weights.live for weights in every))


def kernel_before(ops: Sequence[Op], place: int) -> list[Op]:
    """Returns the last kernel before a place in a pass, if there is any."""
    return next(([op] for op in reversed(ops[:place]) if op.stream == COMPUTE), [])
