"""State of a GPU during a measurement: clocks, power, temperature, and the reasons why it lowers its clock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from meshcast.validation.measurements.cuda import Cuda
from meshcast.validation.measurements.measurement import GPUState

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Names of the bit mask of throttle reasons, in new and old drivers."""

REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "temperature, by software",
    0x40: "temperature, by hardware",
    0x80: "power brake",
}
"""Reasons for a lowered clock by bits, from nvml.h (nvmlClocksEventReasons); an idle GPU is not among them."""

INTERVAL = 0.25
"""Time between two readings [s]."""

WINDOW = 8
"""Latest readings that must agree for a steady clock: two seconds."""

STEADY = 0.01
"""Largest relative difference between the SM clocks of these readings."""

WARM_UP_LIMIT = 30.0
"""Time after which a GPU counts as warm although its clock still changes [s]."""


def read_state(cuda: Cuda) -> GPUState | None:
    """Reads the present state; None if nvidia-smi does not answer."""
    for reasons in REASON_FIELDS:
        answer = cuda.query((*FIELDS, reasons))
        if answer is not None and len(answer) == len(FIELDS) + 1:
            sm, memory, power, temperature = map(_number, answer[:-1])
            return GPUState(
                sm_clock=sm, memory_clock=memory, power=power, temperature=temperature, throttled=_reasons(answer[-1])
            )
    return None


def _number(text: str) -> float | None:
    """Reads a number; None for answers such as [N/A]."""
    with suppress(ValueError):
        return float(text)
    return None


def _reasons(text: str) -> tuple[str, ...]:
    """Returns the names of the reasons in a hexadecimal mask."""
    mask = 0
    with suppress(ValueError):
        mask = int(text, 16)
    return tuple(name for bit, name in REASONS.items() if mask & bit)


class StateMonitor:
    """Reads the state of a GPU every `INTERVAL` seconds in a thread, inside a ``with`` block.

    readings: all states so far.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.readings: list[GPUState] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> StateMonitor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _read(self) -> None:
        while not self._stop.is_set():
            state = read_state(self.cuda)
            if state is None:
                return
            self.readings.append(state)
            self._stop.wait(INTERVAL)

    def is_steady(self) -> bool | None:
        """Returns whether the latest SM clocks agree within `STEADY`; None if nvidia-smi does not tell clocks."""
        clocks = [reading.sm_clock for reading in self.readings[-WINDOW:] if reading.sm_clock]
        if not clocks and not self._thread.is_alive():
            return None
        return len(clocks) == WINDOW and max(clocks) <= min(clocks) * (1 + STEADY)

    def summary(self) -> GPUState | None:
        """Returns the median clocks, highest power and temperature, and all throttle reasons of the readings."""
        if not self.readings:
            return None

        def over_all(reduce: Callable[[list[float]], float], name: str) -> float | None:
            values = [value for reading in self.readings if (value := getattr(reading, name)) is not None]
            return reduce(values) if values else None

        reasons = dict.fromkeys(reason for reading in self.readings for reason in reading.throttled)
        return GPUState(
            sm_clock=over_all(statistics.median, "sm_clock"),
            memory_clock=over_all(statistics.median, "memory_clock"),
            power=over_all(max, "power"),
            temperature=over_all(max, "temperature"),
            throttled=tuple(reasons),
        )


def warm_up(runs: int, monitor: StateMonitor | None, agree: Callable[[bool], bool]) -> Iterator[int]:
    """Yields the numbers of the warm-up runs: at least `runs`, and with a monitor until the SM clock is steady, for at
    most `WARM_UP_LIMIT` seconds.

    Each run must wait for its end, or the clock of an idle GPU would be read.
    agree: of several processes, makes the decision of a single process that of all.
    """
    begin, done = time.monotonic(), 0

    def is_cold() -> bool:
        return monitor is not None and monitor.is_steady() is False and time.monotonic() - begin < WARM_UP_LIMIT

    while done < runs or agree(is_cold()):
        yield done
        done += 1
