"""Memory as it was played: peaks per device, by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.engine.program import Program, Task
from simulator.engine.simpy_engine import Times


@dataclass(frozen=True)
class Peak:
    """The largest sum of all categories on one device, and its parts at that moment [bytes].

    left: what was not given back by the end of the step.
    """

    total: float
    by: dict[str, float]
    left: float


def peaks(program: Program, times: Times, static: list[dict[str, float]]) -> list[Peak]:
    """The peak of every device; `static` holds what lives through the whole step, by category [bytes].

    At equal times memory is given back before it is taken.
    """
    begin, end = np.array(times.begin), np.array(times.end)
    found = []
    for device, actions in enumerate(program.actions):
        when, delta, kind = [], [], []
        names: list[str] = []
        starts: dict[int, tuple[Task, list[int]]] = {}
        for _, start, task in actions:
            if task.events:
                starts.setdefault(id(task), (task, []))[1].append(start)
        for task, firsts in starts.values():
            for place, at_end, nbytes, category in task.events:
                if category not in names:
                    names.append(category)
                numbers = np.array(firsts) + place
                when.append((end if at_end else begin)[numbers])
                delta.append(np.full(len(numbers), nbytes))
                kind.append(np.full(len(numbers), names.index(category)))
        by = dict(static[device])
        left = 0.0
        if when:
            t, d, k = np.concatenate(when), np.concatenate(delta), np.concatenate(kind)
            order = np.lexsort((d, t))
            run = np.cumsum(d[order])
            top = int(np.argmax(run))
            left = float(run[-1])
            if run[top] > 0:
                for i, name in enumerate(names):
                    by[name] = by.get(name, 0.0) + float(d[order][: top + 1][k[order][: top + 1] == i].sum())
        found.append(Peak(sum(by.values()), by, left))
    return found
