"""A Metropolis walk over the assignments of a table, as FlexFlow's (Jia et al. 2019, arXiv 1807.05358, section 6.2).

A proposal draws a variable and another option of it. It is accepted if it is not worse, otherwise with probability
exp(-beta x increase); only the factors of the variable are evaluated again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from meshcast.experiments.planning.cores.elimination import Optimum
from meshcast.experiments.planning.table import Assignment, FactorTable


def walk_table(
    table: FactorTable,
    steps: int,
    starts: Iterable[Assignment] = (),
    beta: float = 0.0,
    seed: int = 0,
    memory: float = math.inf,
) -> Optimum:
    """The best assignment that walks from `starts` meet, each of `steps` proposals.

    starts: by default one, drawn at random.
    beta: inverse temperature [1/s]; 0: 20 over the objective of the start (an increase of 5 % passes once in e).
    seed: of the random numbers.
    memory: assignments of more bytes are rejected, and worse than all others until one fits.
    The walk returns to the best assignment 100 times, as FlexFlow's released optimiser does (`mcmc_optimize`).
    """
    draw = random.Random(seed)
    names = [name for name, options in table.choices.items() if len(options) > 1]
    factors = table.touching()
    best: Optimum | None = None
    visited = 0
    given = [dict(one) for one in starts] or [
        {name: draw.randrange(len(options)) for name, options in table.choices.items()}
    ]
    for start in given:
        now, excess = dict(start), _excess(table.cost(start).nbytes, memory)
        value, nbytes = table.value(now), table.cost(now).nbytes
        cold = beta or (20.0 / value if math.isfinite(value) and value > 0 else 1.0)
        kept, kept_rank = dict(now), (excess, value)
        kept_nbytes = nbytes
        for step in range(steps if names else 0):
            if step % max(1, steps // 100) == 0:
                now, (excess, value), nbytes = dict(kept), kept_rank, kept_nbytes
            name = draw.choice(names)
            before = now[name]
            other = draw.randrange(len(table.choices[name]) - 1)
            option = other + (other >= before)
            old, old_bytes = _own_cost(table, factors[name], now)
            now[name] = option
            new, new_bytes = _own_cost(table, factors[name], now)
            visited += 1
            changed = value - old + new if math.isfinite(old) else table.value(now)
            size = nbytes - old_bytes + new_bytes
            over, delta = _excess(size, memory), changed - value
            better = (over, changed) <= (excess, value) or (math.isinf(value) and math.isfinite(changed))
            if better or (over <= excess and draw.random() < math.exp(-min(700.0, cold * delta))):
                value, nbytes, excess = changed, size, over
                if (excess, value) < kept_rank:
                    kept, kept_rank, kept_nbytes = dict(now), (excess, value), nbytes
            else:
                now[name] = before
        found = table.value(kept)
        if best is None or (_excess(table.cost(kept).nbytes, memory), found) < (
            _excess(table.cost(best.assignment).nbytes, memory),
            best.value,
        ):
            best = Optimum(kept, found, visited)
    assert best is not None
    return best._replace(visited=visited)


def _own_cost(table: FactorTable, factors: Iterable, now: Assignment) -> tuple[float, float]:
    costs = [factor.at(now) for factor in factors]
    return sum(table.microbatches * one.seconds + one.once for one in costs), sum(one.nbytes for one in costs)


def _excess(nbytes: float, memory: float) -> float:
    return max(0.0, nbytes - memory)
