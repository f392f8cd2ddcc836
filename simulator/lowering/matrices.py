"""Lowers the update of matrices by optimizers that treat a matrix as one: Muon orthogonalises its momentum.

Newton-Schulz iterations, each X <- a X + (b A + c A A) X with A = X X^T, have three products: of a matrix with s rows
on its shorter side and l on its longer one 2 s^2 l + 2 s^3 + 2 s^2 l FLOPs. Replicas share the matrices:

owner: each matrix is a rank's, with its states: the next largest goes to the rank with the least to compute, as long as
    that holds at most 1.3 times the mean (`_compute_per_buffer_param_layout` of Megatron-Core's
    layer_wise_optimizer.py, of which this is one bucket).
exchange: shards of a matrix go to one rank, which computes its update and sends shards of that back: all-to-alls.
gather: the matrices are gathered that a rank's contiguous share cuts (Moonlight, arXiv 2502.16982, algorithm 1).
gather-all: the same where all ranks have a shard of every matrix: every rank computes all.
all: every rank has all matrices and computes them.

Matrices that tensor ranks share are gathered and computed by all of them (``duplicated``), computed in shares with an
all-reduce of A in every iteration (``distributed``), or each share by itself (``blockwise``): `newton_schulz_tp` of
NVIDIA-NeMo/Emerging-Optimizers, orthogonalized_optimizers/muon_utils.py, and `TensorParallelMuon` of Megatron-Core.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.capabilities import ShardsStates
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.modules import MatrixUpdate, Update
from meshcast.simulator.ir.ops import IN_TURN, Collective, Gemm, Memory, Op, Param, TensorUse, Work
from meshcast.simulator.lowering.preconditioners import approximate, orthonormalise, precondition
from meshcast.simulator.lowering.scope import OpPlace, Scope

CAP = 1.3
"""Elements that a rank may own over the mean, as far as that can be (`_NUMEL_EPSILON` in Megatron-Core)."""

HELD = "matrices"
"""The memory key of what the update of matrices holds."""


class Matrix(NamedTuple):
    """Equal matrices of a rank.

    rows, columns: of its tensor shard.
    split: see `Param.split`.
    axes: over which replicas share their update.
    view: of the mesh.
    """

    rows: int
    columns: int
    split: tuple[tuple[str, int], ...]
    axes: tuple[str, ...]
    view: str

    @property
    def elements(self) -> int:
        return self.rows * self.columns


class Listed(NamedTuple):
    """Equal matrices of a layer.

    number: of the layer.
    layers: equal layers.
    name: of the parameter.
    """

    matrix: Matrix
    number: int
    layers: int
    name: str


class Share(NamedTuple):
    """What the busiest rank does.

    computed: the number of matrices whose update it computes.
    elements: that it updates.
    moved: bytes of each all-to-all, or gathered; 0: none.
    """

    computed: Counter[Matrix]
    elements: float
    moved: float = 0.0


def is_matrix(param: Param) -> bool:
    """Says whether a parameter is a matrix of a linear layer, or several of experts; embeddings, output layers, norms
    and biases are not."""
    return param.matrix > 0 and len(param.shape) == 2


def list_matrices(
    mesh: Mesh, sharding: Sequence[ShardsStates], params: Iterable[tuple[Param, int]], update: MatrixUpdate
) -> list[Listed]:
    """Returns the matrices of a rank, layer by layer.

    sharding: schemes that may shard states.
    update: of the matrices. Replicas that have all states share Dion's decompositions.
    """
    joined, replicas = update.joined, update.owners == "replicas"
    listed: list[Listed] = []
    gate: Param | None = None
    for param, layers in params:
        if not is_matrix(param):
            continue
        shares = (scheme.reduces(param) if replicas else scheme.update_shards(param) for scheme in sharding)
        axes = tuple(axis for each in shares for axis in each)
        axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
        rows, columns = param.shape
        if joined and gate is not None and param.name.endswith("up") and param.shape == gate.shape:
            listed.pop()
            columns *= 2
        split = tuple((axis, side) for axis, side in param.split if mesh.size(axis) > 1)
        matrix = Matrix(rows, columns, split, axes, param.view)
        listed.append(Listed(matrix, param.size // param.matrix, layers, param.name))
        gate = param if param.name.endswith("gate") else None
    return listed


def own_matrices(matrices: Counter[Matrix], ranks: int, cap: float = CAP) -> tuple[Counter[Matrix], float]:
    """Gives every matrix to a rank; returns those of the rank that computes longest, and the most elements of a rank.

    cap: see `CAP`.
    """
    loads, held = np.zeros(ranks), np.zeros(ranks)
    owned: list[Counter[Matrix]] = [Counter() for _ in range(ranks)]
    most = cap * sum(matrix.elements * number for matrix, number in matrices.items()) / ranks
    for matrix in sorted(matrices, key=_cost, reverse=True):
        for _ in range(matrices[matrix]):
            fits = held + matrix.elements <= most
            rank = int(np.argmin(np.where(fits, loads, np.inf)) if fits.any() else np.argmin(held))
            loads[rank] += _cost(matrix)
            held[rank] += matrix.elements
            owned[rank][matrix] += 1
    return owned[int(np.argmax(loads))], float(held.max())


def count_most_owned(
    mesh: Mesh, sharding: Sequence[ShardsStates], params: Iterable[tuple[Param, int]], update: MatrixUpdate
) -> float:
    """Returns the elements of matrices that the fullest rank owns over the mean. sharding, update: as before."""
    most = mean = 0.0
    for axes, matrices in _by_axes(list_matrices(mesh, sharding, params, update)).items():
        most += own_matrices(matrices, mesh.size(axes))[1]
        mean += _count_elements(matrices) / mesh.size(axes)
    return most / mean if mean else 1.0


def _cost(matrix: Matrix) -> float:
    return max(matrix.rows, matrix.columns) * min(matrix.rows, matrix.columns) ** 2


def _by_axes(listed: Iterable[Listed]) -> dict[tuple[str, ...], Counter[Matrix]]:
    by_axes: dict[tuple[str, ...], Counter[Matrix]] = defaultdict(Counter)
    for matrix, number, layers, _ in listed:
        by_axes[matrix.axes][matrix] += number * layers
    return by_axes


def _by_layers(listed: Iterable[Listed]) -> list[list[Listed]]:
    """Returns the matrices of every run of equal layers."""
    runs: list[list[Listed]] = []
    for entry in listed:
        if not runs or runs[-1][0].layers != entry.layers or any(entry.name == other.name for other in runs[-1]):
            runs.append([])
        runs[-1].append(entry)
    return runs


def lower_matrices(scope: Scope, module: Update, behind: Sequence[Op]) -> tuple[list[Op], list[TensorUse], float]:
    """Lowers the update of the matrices of a device.

    behind: what it waits for.

    Returns the ops in issue order, their use of buffers, and the elements of matrices over the ranks that share them.
    """
    update = module.matrices
    assert update is not None
    shares = list(_share_out(scope, module.params, update))
    kind = _DionRound if update.method == "dion" else _UpdateRound
    rounds = [kind(scope, update, axes, share, behind) for axes, share in shares]
    ops: list[Op] = []
    for place, each in enumerate(rounds):
        # Shards of a round are exchanged while the matrices of that before are computed.
        ops += each.first() if not place else []
        ops += rounds[place + 1].first() if place + 1 < len(rounds) else []
        ops += each.compute()
        ops += rounds[place - 1].last() if place else []
    ops += rounds[-1].last() if rounds else []
    held = max((each.held for each in rounds), default=0.0)
    ends = zip((ops[:1], ops[-1:]), (True, False), strict=True)
    uses = [TensorUse(HELD, round(held), op, is_first) for end, is_first in ends for op in end]
    shared = 0.0
    for param, count in module.params:
        axes = [axis for scheme in scope.sharding for axis in scheme.update_shards(param)]
        shared += is_matrix(param) * count * param.size / scope.mesh.size(axes)
    return ops, uses, shared


def _share_out(
    scope: Scope, params: Iterable[tuple[Param, int]], update: MatrixUpdate
) -> Iterable[tuple[tuple[str, ...], Share]]:
    """Yields what the busiest rank does in every round, and the axes of its replicas."""
    listed = list_matrices(scope.mesh, scope.sharding, params, update)
    for axes, matrices in _by_axes(listed).items():
        ranks, elements = scope.mesh.size(axes), _count_elements(matrices)
        if ranks == 1 or update.owners in ("all", "replicas"):
            yield axes, Share(matrices, elements)
        elif update.method == "dion":
            yield axes, Share(matrices, elements / ranks)
        elif update.owners == "gather-all":
            yield axes, Share(matrices, elements / ranks, update.width * elements)
        elif update.owners == "owner":
            yield axes, Share(*own_matrices(matrices, ranks))
        elif update.owners == "exchange":
            of_axes = [entry for entry in listed if entry.matrix.axes == axes]
            yield from ((axes, share) for share in _exchange(of_axes, ranks, update))
        else:
            of_axes = [entry for entry in listed if entry.matrix.axes == axes]
            yield axes, _gather(of_axes, ranks, elements, update)


def _count_elements(matrices: Counter[Matrix]) -> float:
    return float(sum(matrix.elements * number for matrix, number in matrices.items()))


def _exchange(listed: Sequence[Listed], ranks: int, update: MatrixUpdate) -> Iterable[Share]:
    """Yields the rounds in which ranks exchange shards; ranks that have whole experts exchange none of these."""
    local: Counter[Matrix] = Counter()
    for matrix, number, layers, _ in listed:
        if number >= ranks:
            local[matrix] += math.ceil(number / ranks) * layers
    if local:
        yield Share(local, _count_elements(local))
    for bucket in _buckets([entry for entry in listed if entry.number < ranks], update.together):
        if update.batched:  # padded, so that all ranks have as many
            computed = Counter({matrix: math.ceil(number / ranks) for matrix, number in bucket.items()})
        else:
            computed = own_matrices(bucket, ranks, math.inf)[0]
        elements = _count_elements(bucket) / ranks
        yield Share(computed, elements, update.width * max(_count_elements(computed), elements))


def _buckets(listed: Sequence[Listed], together: int) -> Iterable[Counter[Matrix]]:
    """Yields the matrices that are exchanged together: those of some layers, or all of a shape."""
    if not together:
        shapes: Counter[Matrix] = Counter()
        for matrix, number, layers, _ in listed:
            shapes[matrix] += number * layers
        yield from (Counter({matrix: number}) for matrix, number in shapes.items())
        return
    every_layer = [run for run in _by_layers(listed) for _ in range(run[0].layers)]
    for first in range(0, len(every_layer), together):
        bucket: Counter[Matrix] = Counter()
        for entry in chain.from_iterable(every_layer[first : first + together]):
            bucket[entry.matrix] += entry.number
        yield bucket


def _gather(listed: Sequence[Listed], ranks: int, elements: float, update: MatrixUpdate) -> Share:
    """Returns what a rank does whose contiguous share of all elements cuts a matrix at both ends."""
    names = list(dict.fromkeys(entry.matrix for entry in listed))
    runs = [np.repeat([names.index(e.matrix) for e in run], [e.number for e in run]) for run in _by_layers(listed)]
    kinds = np.concatenate([np.tile(kinds, run[0].layers) for kinds, run in zip(runs, _by_layers(listed), strict=True)])
    ends = np.cumsum(np.array([matrix.elements for matrix in names], float)[kinds])
    summed = np.concatenate([[0.0], np.cumsum(np.array([_cost(matrix) for matrix in names], float)[kinds])])
    borders = np.arange(ranks + 1) * (elements / ranks)
    first = np.searchsorted(ends, borders[:-1] * (1 + 1e-12), side="right")
    last = np.minimum(np.searchsorted(ends, borders[1:] * (1 - 1e-12)), len(ends) - 1)
    rank = int(np.argmax(summed[last + 1] - summed[first]))
    computed = Counter(names[kind] for kind in kinds[first[rank] : last[rank] + 1].tolist())
    missing = max(0.0, _count_elements(computed) - elements / ranks)
    return Share(computed, elements / ranks, update.width * missing)


class _UpdateRound:
    """The ops of a round: momentum and what is moved, the updates, and what is moved back."""

    def __init__(
        self, scope: Scope, update: MatrixUpdate, axes: tuple[str, ...], share: Share, behind: Sequence[Op]
    ) -> None:
        self.scope, self.update, self.axes, self.share, self.behind = scope, update, axes, share, list(behind)
        self.view = next((matrix.view for matrix in share.computed), "")
        self.ready: list[Op] = self.behind

    @property
    def held(self) -> float:
        """Bytes that are held at once: of matrices that are computed together, and of what is exchanged."""
        largest = 0.0
        for matrix, number in self.share.computed.items():
            rows, columns = self._whole(matrix)
            # Both squares of an iteration, or one of a factor.
            products = 4 * max(rows, columns) ** 2 if self.update.largest else 2 * 2 * min(rows, columns) ** 2
            gathered = 2 * self.update.nbytes * rows * columns * ((rows, columns) != matrix[:2])
            each = self.update.temporaries * rows * columns + gathered + products
            largest = max(largest, each * (number if self.update.batched else 1))
        moved = self.share.moved if self.update.owners == "exchange" else 0.0
        return largest + 3 * moved  # momentum, what arrives, and updates

    def first(self) -> list[Op]:
        """Makes the momentum, and moves it."""
        ops = [self._pass("momentum", self.share.elements, self.update.passes[0])]
        if self.update.owners == "gather-all" and self.share.moved:
            for matrix, number in self.share.computed.items():
                nbytes = self.update.width * matrix.elements
                each = partial(self._collective, "gather momentum", "all_gather", nbytes, self.axes)
                for _ in range(number):
                    ops.append(each(ops[-1:]))
        elif self.share.moved:
            operation = "all_to_all" if self.update.owners == "exchange" else "all_gather"
            ops.append(self._collective("exchange momentum", operation, self.share.moved, self.axes, ops))
        self.ready = ops[-1:]
        return ops

    def compute(self) -> list[Op]:
        """Computes the updates of all matrices of the rank."""
        ops: list[Op] = []
        for matrix, number in self.share.computed.items():
            turns = 1 if self.update.batched else number
            for work in self._works(matrix, number):
                op = self.scope.op("orthogonalise", work, [*self.ready, *ops[-1:]], "U", OpPlace(self.view))
                op.tag, op.launches = IN_TURN, 1.0
                if isinstance(work, Memory | Gemm):
                    op.launches = turns * self.update.kernels[1] if isinstance(work, Memory) else work.part
                if self.update.largest:  # a library launches the kernels of a decomposition
                    op.launches = float(number)
                ops.append(op)
        self.ready = ops[-1:]
        return ops

    def last(self) -> list[Op]:
        """Moves updates back, and updates the weights."""
        ops: list[Op] = []
        if self.share.moved and self.update.owners == "exchange":
            ops = [self._collective("exchange updates", "all_to_all", self.share.moved, self.axes, self.ready)]
        return [*ops, self._pass("update matrices", self.share.elements, self.update.passes[1], ops or self.ready)]

    def _pass(self, name: str, elements: float, nbytes: tuple[float, float], after: Sequence[Op] = ()) -> Op:
        work = Memory("matrix-pass", round(elements * nbytes[0]), round(elements * nbytes[1]))
        op = self.scope.op(name, work, after or self.behind, "U")
        op.tag, op.launches = IN_TURN, float(self.update.kernels[0] * self.share.computed.total())
        return op

    def _collective(self, name: str, operation: str, nbytes: float, axes: tuple[str, ...], after: Sequence[Op]) -> Op:
        return self.scope.op(name, Collective(operation, round(nbytes), axes), after, "U", OpPlace(self.view))

    def _whole(self, matrix: Matrix) -> tuple[int, int]:
        """Returns rows and columns of the matrix that a rank computes."""
        sides = [matrix.rows, matrix.columns]
        if self.update.tensor == "duplicated" and not self.update.largest:
            for axis, side in matrix.split:
                sides[side] *= self.scope.mesh.size(axis)
        return sides[0], sides[1]

    def _works(self, matrix: Matrix, number: int) -> Iterable[Work]:
        """Yields the work of equal matrices."""
        rows, columns = self._whole(matrix)
        elements = number * rows * columns
        if self.update.largest:
            of_roots = self.update.method == "shampoo", self.update.every, self.update.largest
            yield from precondition(rows, columns, number, *of_roots)
            return
        axes = tuple(axis for axis, _ in matrix.split)
        if axes and self.update.tensor == "duplicated":
            nbytes = self.update.nbytes
            yield from [Collective("all_gather", nbytes * rows * columns, axes)] * number
            yield Memory("matrix-pass", nbytes * elements, nbytes * elements)
        read, written = self.update.inner
        yield Memory("matrix-pass", round(elements * read), round(elements * written))
        short, long = sorted((rows, columns))
        sums: list[Work] = []
        if axes and self.update.tensor == "distributed":
            side, *further = {side for _, side in matrix.split}
            if further:
                rule = "tensor ranks share both sides of a matrix, and products are summed over shares of one"
                raise PlanError("optimizer.tensor", rule, "Use duplicated or blockwise", "distributed")
            short, long = (columns, rows) if side == 0 else (rows, columns)
            sums = [Collective("all_reduce", 2 * short**2, axes)] * number
        gram, *others = newton_schulz(short, long, number, self.update)
        yield from (gram, *sums * self.update.steps, *others)


class _DionRound(_UpdateRound):
    """The ops of Dion: products of shards or of whole matrices, and decompositions that ranks share out."""

    def compute(self) -> list[Op]:
        ops: list[Op] = []
        ranks = self.scope.mesh.size(self.axes)
        shards = 1 if self.update.owners == "replicas" else ranks
        for matrix, number in self.share.computed.items():
            if matrix.split:
                rule = "tensor ranks share matrices, whose bases they would have to sum"
                raise PlanError("optimizer", rule, "Use tp: 1, or muon", "dion")
            # Replicas turn matrices so that they are tall; shards are of the columns.
            rows, columns = matrix.rows, matrix.columns
            if shards == 1:
                rows, columns = max(rows, columns), min(rows, columns)
            rank = math.ceil(self.update.rank * min(rows, columns))
            before, behind = approximate(rows, columns, rank, number, shards)
            nbytes = self.update.nbytes * rows * rank * number
            scatters = [Collective("reduce_scatter", nbytes, self.axes)] if shards > 1 else []
            gathers = [Collective("all_gather", nbytes, self.axes)] if ranks > 1 else []
            bases = [*orthonormalise(rows, rank, math.ceil(number / ranks))]
            works: list[Work] = [*before, *scatters, *bases, *gathers, *behind]
            for work in works:
                op = self.scope.op("basis", work, [*self.ready, *ops[-1:]], "U", OpPlace(self.view))
                op.tag, op.launches = IN_TURN, float(number) if isinstance(work, Gemm) else 1.0
                ops.append(op)
        self.ready = ops[-1:]
        return ops


def newton_schulz(short: int, long: int, number: int, update: MatrixUpdate) -> tuple[Gemm, Gemm, Gemm]:
    """Returns the three products of all iterations of equal matrices.

    short, long: their sides; of a share of a matrix that is cut along its longer side, `long` of it.
    """
    batch = number if update.batched else 1
    turns = update.steps * number // batch

    def multiply(rows: float, columns: int, inner: int, layout: str, adds: bool) -> Gemm:
        work = Gemm(rows * turns, columns, inner, batch, layout=layout, what="orthogonalise", part=float(turns))
        return replace(work, accumulate=adds)

    half = short / 2 if update.symmetric else short
    return (
        multiply(half, short, long, "tn", False),
        multiply(half, short, short, "nn", True),
        multiply(short, long, short, "nn", True),
    )
