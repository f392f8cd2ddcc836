"""Plays a program on SimPy with contention for links and streaming multiprocessors (SMs).

Every op has a rate: 1 if it shares no link and no SM with others, less if it does.

- Communication waits for its latency; then its bytes are sent at the max-min fair share of the device's links
  (`simulator.engine.fair_share`), in both directions; ops of a higher priority take theirs first. A message uses the
  outgoing links of its sender and the incoming links of its receiver. A device stands for all ranks of a stage: each
  rank has its links, and the groups of a stage communicate at the same time.
- From launch to end, communication occupies SMs, a message those of both ends. A kernel that needs all SMs (GEMM,
  attention) then takes

      seconds (1 + c),   c = occupied / (all - occupied)

  and a memory-bound kernel as long as without communication. One that leaves SMs to communication from the start
  (`Gemm.reserved`) is slower by them anyway, and slows down only where more are occupied.

When an op begins or ends, only ops that share a link or SMs with it, directly or through others, get new rates. Rates
are at most 1, so no step is shorter than without contention. Faster links may make a step longer: an op that begins
earlier may slow an op on the critical path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import simpy

from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.costs.estimate import ALONE, TIERS, Use, Uses
from meshcast.simulator.engine.fair_share import fair_rates, fair_rates_by_priority
from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.engine.simpy_engine import play as play_on
from meshcast.simulator.ir.ops import Communication, Op
from meshcast.simulator.program.flatten import FlatProgram

Place = tuple[int, str, str]
"""A device, a tier of its links, and the direction."""

Known = tuple[Use, dict[Place, float]]
"""What an op occupies, and its share of each link that it uses."""

MIN_SHARE = 0.01
"""Minimum share of the multiprocessors that communication leaves to kernels: about 1 of a hundred."""


def play(flat: FlatProgram, uses: Sequence[Uses]) -> OpTimes:
    """Computes the times of all ops. uses: by device, a function that says what the work of an op occupies.

    Raises ScheduleError for a deadlock.
    """
    return play_on(flat, lambda env: Traffic(env, flat, uses).run)


class Running:
    """An op that may be slowed.

    left: work that remained at the time `since` [s at rate 1].
    rate: its rate since then.
    needed: of a kernel, the share of the SMs without which it slows down.
    timer: event at which it ends if its rate does not change.
    """

    __slots__ = ("device", "done", "left", "links", "needed", "number", "op", "rate", "since", "timer")

    def __init__(
        self, number: int, op: Op, device: int, left: float, links: dict[Place, float], done: simpy.Event
    ) -> None:
        self.number, self.op, self.device, self.left = number, op, device, left
        self.links, self.done = links, done
        self.rate = self.since = 0.0
        self.needed = 1.0
        self.timer: simpy.Event | None = None


class Traffic:
    """The ops that run now, by number.

    flows: by link and direction, the communication on it.
    kernels: by device, the kernels that need all SMs.
    kept: by device, the share of the SMs that each communication occupies.
    """

    def __init__(self, env: simpy.Environment, flat: FlatProgram, uses: Sequence[Uses]) -> None:
        self.env, self.flat, self.uses = env, flat, uses
        self.flows: dict[Place, dict[int, Running]] = defaultdict(dict)
        self.kernels: dict[int, dict[int, Running]] = defaultdict(dict)
        self.kept: dict[int, dict[int, float]] = defaultdict(dict)
        self._receiver = {number: device for number, _, device in flat.sent}

    def run(self, number: int) -> simpy.Event:
        """Starts an op; returns the event of its end."""
        device, seconds = self.flat.device[number], self.flat.seconds[number]
        use, links = self._use(number, device)
        if not links and not use.multiprocessors:
            return self.env.timeout(seconds)
        done = self.env.event()
        if isinstance(self.flat.ops[number].work, Communication):
            moving = min(use.moving, seconds) if links else 0.0
            running = Running(number, self.flat.ops[number], device, moving, links, done)
            # A kernel sends, and a kernel of the receiver receives.
            for end in {device, self._receiver.get(number, device)} if use.multiprocessors else ():
                self.kept[end][number] = use.multiprocessors
                self._pace_kernels(end)
            latency = self.env.timeout(seconds - moving)
            latency.callbacks.append(lambda _: self._move(running))
        else:
            running = Running(number, self.flat.ops[number], device, seconds, links, done)
            running.needed = use.multiprocessors or 1.0
            self.kernels[device][number] = running
            self._pace_kernel(running)
        return done

    def _use(self, number: int, device: int) -> Known:
        return self._use_of(self.flat.ops[number], device, self._receiver.get(number, device))

    @remembered
    def _use_of(self, op: Op, device: int, receiver: int) -> Known:
        uses = [self.uses[end](op.work) for end in (device, receiver)] if op.work is not None else [ALONE]
        use = max(uses, key=lambda known: known.moving)  # of a message between two kinds of GPUs, the slower end's
        ends = (device, "out", use.links), (receiver, "in", use.links if use.received is None else use.received)
        links = {
            (end, tier, way): share
            for end, way, shares in ends
            for tier, share in zip(TIERS, shares, strict=True)
            if share and use.moving
        }
        return use, links

    # ------------------------------------------------------------------------------------------ links

    def _move(self, running: Running) -> None:
        """Begins to send the bytes of an op, whose latency is over."""
        if not running.left:
            self._end(running)
            return
        for place in running.links:
            self.flows[place][running.number] = running
        self._share([running])

    def _share(self, flows: Iterable[Running]) -> None:
        """Sets the fair rates of these flows and of all that share links with them, directly or through others."""
        seen = set[int]()
        for first in flows:
            if first.number in seen:
                continue
            seen.add(first.number)
            met = [first]
            for running in met:
                for place in running.links:
                    for number, other in self.flows[place].items():
                        if number not in seen:
                            seen.add(number)
                            met.append(other)
            for running, rate in zip(met, self._fair(met) if len(met) > 1 else [1.0], strict=True):
                self._set_rate(running, rate)

    @remembered_by(lambda traffic, met: tuple((running.op, running.device) for running in met))
    def _fair(self, met: list[Running]) -> list[float]:
        links, priorities = [running.links for running in met], [running.op.priority for running in met]
        equal = len({*priorities}) == 1
        return fair_rates(links) if equal else fair_rates_by_priority(links, priorities)

    # -------------------------------------------------------------------------------- multiprocessors

    def _free_share(self, device: int) -> float:
        """Returns the share of the SMs that communication leaves to kernels."""
        return max(MIN_SHARE, 1.0 - sum(self.kept[device].values()))

    def _pace_kernels(self, device: int) -> None:
        for running in self.kernels[device].values():
            self._pace_kernel(running)

    def _pace_kernel(self, running: Running) -> None:
        self._set_rate(running, min(1.0, self._free_share(running.device) / running.needed))

    # ------------------------------------------------------------------------------------------- time

    def _set_rate(self, running: Running, rate: float) -> None:
        """Sets the rate of an op, and the timer of its end; an op of rate 0 has none."""
        if rate == running.rate:
            return
        now = self.env.now
        running.left = max(0.0, running.left - (now - running.since) * running.rate)
        running.since, running.rate = now, rate
        if not rate:
            running.timer = None
            return
        running.timer = timer = self.env.timeout(running.left / rate)
        timer.callbacks.append(lambda _: self._end(running) if running.timer is timer else None)

    def _end(self, running: Running) -> None:
        """Ends an op and raises the rates of those that shared links or SMs with it."""
        running.done.succeed()
        self.kernels[running.device].pop(running.number, None)
        near: dict[int, Running] = {}
        for place in running.links:
            self.flows[place].pop(running.number, None)
            near |= self.flows[place]
        if near:
            self._share(near.values())
        for end in {running.device, self._receiver.get(running.number, running.device)}:
            if self.kept[end].pop(running.number, None):
                self._pace_kernels(end)
