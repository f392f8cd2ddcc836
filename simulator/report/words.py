"""Numbers, times and plans in words: what pages and plots write alike."""

from __future__ import annotations

from simulator.plan.plan import Plan


def format_seconds(value: float) -> str:
    """A time with four significant figures, in seconds, milliseconds or microseconds.

    >>> format_seconds(16.841), format_seconds(0.035)
    ('16.84 s', '35.00 ms')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 1:
            return f"{format_number(value * scale)} {unit}"
    return f"{format_number(value * 1e6)} us"


def format_number(value: float) -> str:
    """A number with four significant figures, at most three decimals, and thousands separated.

    >>> format_number(7.9078), format_number(498111.2)
    ('7.908', '498,111')
    """
    digits = next((d for d, below in ((3, 10.0), (2, 100.0), (1, 1000.0)) if abs(value) < below), 0)
    return f"{value:,.{digits}f}"


def format_count(value: float) -> str:
    """A number of parameters or tokens in millions, billions or trillions.

    >>> format_count(70553706496), format_count(15e12)
    ('70.55 B', '15 T')
    """
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:,.4g} {unit}"
    return f"{value:,.0f}"


def describe_plan(plan: Plan) -> list[str]:
    """The axes of a plan with their sizes, then its schemes without those over axes of size 1."""
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.named_axes.items())
    words = [f"{axes} = {plan.mesh.world} GPU{'s' if plan.mesh.world > 1 else ''}"]
    for entry in plan.job.plan.schemes:
        if entry.over and plan.mesh.size(entry.over) == 1:
            continue
        name = entry.use.partition("/")[2]
        chunks = (entry.model_extra or {}).get("chunks", 1)
        words.append(f"{name} with {chunks} chunks" if chunks != 1 else name)
    return words
