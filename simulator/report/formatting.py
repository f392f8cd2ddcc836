"""Numbers, times and plans in words: what pages and plots write alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from meshcast.hardware.units import GIB
from meshcast.simulator.job.job import LongPlan
from meshcast.simulator.plan.plan import Plan


def format_seconds(value: float) -> str:
    """Formats a time with four significant figures, in seconds, milliseconds or microseconds.

    >>> format_seconds(16.841), format_seconds(0.035)
    ('16.84 s', '35.00 ms')
    >>> format_seconds(0.00099996)
    '1.000 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if value * scale >= 0.99995:  # no "1,000.0 us"
            return f"{format_number(value * scale)} {unit}"
    return f"{format_number(value * 1e6)} us"


def format_number(value: float) -> str:
    """Formats a number with four significant figures, at most three decimals, and thousands separated.

    >>> format_number(7.9078), format_number(498111.2)
    ('7.908', '498,111')
    """
    digits = next((d for d, below in ((3, 10.0), (2, 100.0), (1, 1000.0)) if abs(value) < below), 0)
    return f"{value:,.{digits}f}"


def format_days(days: float) -> str:
    """Formats a duration in days; less than two days in hours.

    >>> format_days(73.344), format_days(0.7126)
    ('73.34 days', '17.1 hours')
    """
    return f"{format_number(days)} days" if days >= 2 else f"{days * 24:,.3g} hours"


def format_count(value: float) -> str:
    """Formats a number of parameters or tokens in millions, billions or trillions.

    >>> format_count(70553706496), format_count(15e12)
    ('70.55 B', '15 T')
    """
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:,.4g} {unit}"
    return f"{value:,.0f}"


def format_bytes(nbytes: float) -> str:
    """Formats bytes sent, in decimal units as links are rated: bytes over a rate in GB/s are seconds. Memory is in GiB.

    >>> format_bytes(1.5e12), format_bytes(0)
    ('1.5 TB', '0 B')
    """
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.3g} B"


def format_need(need: float, capacity: float) -> str:
    """Formats the memory that a plan needs [bytes], in GiB with as many decimals, 1 to 3, as tell it from the capacity.

    "all 80" of a plan that fits because the allocator returns cached blocks when the GPU is full.

    >>> format_need(50 * 2**30, 80 * 2**30), format_need(79.97 * 2**30, 80 * 2**30), format_need(2**30, 2**30)
    ('50.0', '79.97', 'all 1')
    """
    gib = need / GIB
    if need == capacity:
        return f"all {gib:.4g}"
    decimals = next((n for n in (1, 2) if round(gib, n) != round(capacity / GIB, n)), 3)
    return f"{gib:,.{decimals}f}"


def describe_room(room: float, allocated: float, context: float, capacity: float) -> str:
    """Describes what stays free of the memory of a GPU [bytes], cached blocks of the allocator aside if they fill it.

    room: of the fullest GPU.
    allocated: by its tensors.
    context: of CUDA and libraries.
    """
    whole = f"{capacity / GIB:.4g} GiB"
    if room > 0:
        return f"{_format_room(room)} of {whole} stay free"
    return f"{_format_room(capacity - allocated - context)} of {whole} stay free but for cached blocks"


def format_probability(probability: float) -> str:
    """Formats a probability in whole percents, none of which says that something is certain.

    >>> format_probability(0.972), format_probability(0.9999), format_probability(0.001)
    ('97 %', 'over 99 %', 'under 1 %')
    """
    if not 0.005 <= probability < 0.995:
        return "over 99 %" if probability > 0.5 else "under 1 %"
    return f"{100 * probability:.0f} %"


def _format_room(nbytes: float) -> str:
    """Formats free memory [bytes]: in GiB, or in MiB where that is less than 0.1 GiB.

    >>> _format_room(1.5 * 2**30), _format_room(12 * 2**20)
    ('1.5 GiB', '12 MiB')
    """
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:,.0f} MiB"


def name_device(plan: Plan, device: int) -> str:
    """Names a pipeline device as a person would: "replica 1, stage 0"; where all replicas are alike, "stage
    0"."""
    if not plan.pipelines:
        return f"stage {device}"
    pipeline, stage = plan.ranks.pipeline_of(device)
    name = name_replicas(plan, pipeline)
    return f"{name}, stage {stage}" if plan.pipelines[pipeline].shape.p > 1 else name


def name_replicas(plan: Plan, pipeline: int) -> str:
    """Names the replicas of a pipeline, numbered over all of them: "replica 0", "replicas 1 to 3"."""
    counts = [replica.dp for replica in plan.job.plan.replicas]
    first, count = sum(counts[:pipeline]), counts[pipeline]
    return f"replica {first}" if count == 1 else f"replicas {first} to {first + count - 1}"


def is_heterogeneous(plan: Plan) -> bool:
    """Returns whether stages have separate degrees, or replicas differ."""
    return bool(plan.pipelines or plan.stage_plans)


def describe_device(plan: Plan, device: int) -> str:
    """Describes degrees and GPUs of a pipeline device: "dp 2 x tp 4 on h100-sxm"."""
    stage, ranks = plan.on(device), plan.ranks.of_device(device).tolist()
    sizes = {axis: n for axis, n in stage.mesh.named_axes.items() if axis != stage.ranks.pipeline_axis}
    if stage.positions is not None:
        part, places = stage.positions
        axis = stage.ranks.axis_of(part)
        sizes[axis] = sizes[axis] // stage.mesh.size(part) * len(places)
    axes = " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)
    ends = stage.job.cluster.kinds_of(ranks)
    return f"{axes or '1 GPU'} on {' and '.join(dict.fromkeys(node.gpu.name for node in ends))}"


def describe_microbatches(plan: Plan) -> str:
    """Describes the micro-batches of a step: "8 micro-batches of 2 in each replica"; of heterogeneous replicas those of
    each."""
    each = plan.schedule.microbatches_per_forward
    counts = [part.shape.m * each * part.passes.microbatches_of_unit for part in plan.every_pipeline]
    words = f"{counts[0]} micro-batch{'' if counts[0] == 1 else 'es'} of {plan.job.batch.micro}"
    if plan.pipelines:
        others = (f"{count} in {name_replicas(plan, i)}" for i, count in enumerate(counts) if i)
        return ", ".join((f"{words} in {name_replicas(plan, 0)}", *others))
    return words if plan.stage_plans else f"{words} in each replica"


def describe_value(value: Any) -> str:
    """Describes a value of a field; stages and replicas as "tp 8, layers 12 | tp 4, dp 2, layers 20"."""
    if isinstance(value, str):
        try:
            read = json.loads(value) if value[:2] in ("[{", '{"') else value
        except ValueError:
            return value
        return value if isinstance(read, str) else describe_value(read)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_enclose(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and value and all(isinstance(entry, Mapping) for entry in value):
        return " | ".join(map(describe_value, value))
    return json.dumps(value)


def describe_list(value: Any) -> str:
    """Describes a value of a field; in a long list of numbers equal neighbours as "2 x 14"."""
    if not isinstance(value, list | tuple) or len(value) < 4 or not all(isinstance(number, int) for number in value):
        return describe_value(value)
    runs = [(number, len([*run])) for number, run in groupby(value)]
    return ", ".join(str(number) if count == 1 else f"{number} x {count}" for number, count in runs)


def describe_field(value: Any) -> str:
    """Describes a value of a field; several words as "norm + act", nothing as "-".

    >>> describe_field(["optimizer"]), describe_field([]), describe_field(None)
    ('optimizer', '-', '-')
    """
    if value is None or value == [] or value == ():
        return "-"
    if isinstance(value, list | tuple) and all(isinstance(word, str) for word in value):
        return " + ".join(value)
    return describe_list(value)


def describe_changes(changes: Mapping[str, Any]) -> str:
    """Describes fields with their values: "plan.tp 4, plan.zero 1"; those without a value are left out."""
    words = ((name, describe_field(value)) for name, value in changes.items())
    return ", ".join(f"{name} {value}" for name, value in words if value != "-")


def _enclose(value: Any) -> str:
    words = describe_value(value)
    return f"({words})" if " " in words else words


def describe_order(count: int) -> str:
    """Says that the best plans of a table cannot be told apart; empty if the best stands alone.

    count: of the plans that lie within the interval of the best, itself included.
    """
    if count < 2:
        return ""
    return f"the first {count} lie within the interval of the best one: a real cluster may rank them otherwise"


def describe_plan(plan: Plan) -> list[str]:
    """Describes a plan: its axes with their sizes, then its schemes without those over axes of size 1."""
    gpus = plan.job.cluster.gpus
    words = [f"{_describe_axes(plan.job.plan)} = {gpus} GPU{'s' if gpus > 1 else ''}"]
    meshes = [*plan.job.plan.stages, *(stage for replica in plan.job.plan.replicas for stage in replica.stages)]
    if experts := plan.job.plan.views.get("experts", {}):
        words.append(f"experts {' x '.join(f'{axis} {size}' for axis, size in experts.items())}")
    for mesh in (plan.job.plan, *meshes):
        for entry in mesh.schemes:
            if entry.over and plan.mesh.size(entry.over) == 1 and not meshes:
                continue
            name = entry.use.partition("/")[2]
            chunks = (entry.model_extra or {}).get("chunks", 1)
            words.append(f"{name} with {chunks} chunks" if chunks != 1 else name)
    return list(dict.fromkeys(words)) if meshes else words


def _describe_axes(plan: LongPlan) -> str:
    """Describes the sizes of the axes; of heterogeneous stages and replicas those of each, equal neighbours once.

    "(dp 1 x tp 4 | 2 of dp 2 x tp 2)" are three stages.
    """
    if plan.stages:
        stages = [" x ".join(f"{axis} {size}" for axis, size in stage.mesh.items()) for stage in plan.stages]
        runs = [(axes, len(list(run))) for axes, run in groupby(stages)]
        return f"({' | '.join(axes if count == 1 else f'{count} of {axes}' for axes, count in runs)})"
    if any(replica.stages for replica in plan.replicas):
        wholes = [_describe_axes(plan.model_copy(update={"stages": replica.stages})) for replica in plan.replicas]
        return " + ".join(
            f"{axes} x {replica.count or '?'} micro-batches"
            for axes, replica in zip(wholes, plan.replicas, strict=True)
        )
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    if not plan.replicas:
        return axes
    counts = " + ".join(f"{replica.dp} x {replica.count or '?'}" for replica in plan.replicas)
    return f"{axes} with {counts} micro-batches"
