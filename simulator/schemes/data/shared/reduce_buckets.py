"""GPU memory of the buckets in which data schemes reduce gradients, as the framework says it (`Bucket`).

Contiguous buffers take every gradient as soon as it is computed, so that of the unsharded gradients only the largest
is beside them; a bucket is copied into a flat tensor while it is reduced.

    backward     layer 3           | layer 2           | layer 1
    buffer 1     fills ........... | reduced ......... | fills ...
    buffer 2                       | fills ........... | reduced ...      with overlap
    copy                             flat copy of 1      flat copy of 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.ir.capabilities import ShardsStates
from meshcast.simulator.ir.ops import BYTES, Fragment, Param, StageOps, TensorUse

HELD = "buckets"
"""Key of the buffers and copies that a unit holds."""


def fill_buckets(params: Sequence[Param], elements: float) -> list[list[Param]]:
    """Returns parameters in buckets of up to so many elements; a larger parameter alone."""
    buckets: list[list[Param]] = []
    room = 0.0
    for param in params:
        if not buckets or param.size > room:
            buckets.append([])
            room = elements
        buckets[-1].append(param)
        room -= param.size
    return buckets


def count_bucket_bytes(scheme: ShardsStates, bucket: float, elements: float) -> float:
    """Returns the bytes of buffers and copies that come and go with a reduction.

    bucket: elements of a full bucket.
    elements: of all gradients that are reduced.

    Whole gradients that are accumulated in another format than that of the weights are reduced where they are
    (BF16_Optimizer of DeepSpeed).
    """
    framework, memory = scheme.framework, scheme.framework.bucket
    if "gradients" not in scheme.shards and framework.gradients != framework.weights:
        return 0.0
    width = BYTES[framework.gradients]
    copied = memory.copies * width
    if memory.sequence_format and scheme.mesh.size(scheme.sequence_axes) > 1:
        # Stage 3 converts every gradient and then copies all of them, other stages copy first (`__avg_scatter_grads`,
        # `allreduce_bucket`).
        converted = BYTES[memory.sequence_format]
        copied = converted + (memory.copies * converted if "parameters" in scheme.shards else copied)
    buffers = 0 if "parameters" in scheme.shards else memory.buffers + (memory.doubled and framework.overlap.dp)
    return float(buffers * bucket * width + copied * min(bucket, elements))


def count_resting_bytes(scheme: ShardsStates, bucket: float) -> float:
    """Returns the bytes of buffers that live through the whole step: those of sharded weights, which are allocated with
    the optimizer."""
    framework = scheme.framework
    buffers = framework.bucket.buffers if "parameters" in scheme.shards else 0
    return float(buffers * bucket * BYTES[framework.gradients])


def hold_buckets(scheme: ShardsStates, bucket: float, stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` in which every unit has buffers and copies of a bucket from its first gradient to its last.

    bucket: elements of a full bucket.
    """
    if not (scheme.framework.bucket.buffers or scheme.framework.bucket.copies):
        return stage_ops
    reduced = [(param, count) for param, count in stage_ops.params() if param.trained and scheme.reduces(param)]
    nbytes = round(count_bucket_bytes(scheme, bucket, sum(count * param.size for param, count in reduced)))
    if not (reduced and nbytes):
        return stage_ops

    def hold(fragment: Fragment) -> Fragment:
        return scheme.derived_units.derive(fragment, (HELD, nbytes), lambda: _hold_bytes(fragment, nbytes))

    units = [replace(unit_run, fragment=hold(unit_run.fragment)) for unit_run in stage_ops.unit_runs]
    return replace(stage_ops, unit_runs=units)


def _hold_bytes(fragment: Fragment, nbytes: int) -> Fragment:
    """Returns a unit that holds so many bytes from the first to the last gradient of its weights."""
    ops = [op for op in fragment.backward if op.phase == "W"]
    held = [TensorUse(HELD, nbytes, op, op is ops[0], "buffers") for op in (*ops[:1], *ops[-1:])]
    return replace(fragment, tensor_uses=[*fragment.tensor_uses, *held])


def without_buckets(stage_ops: StageOps) -> StageOps:
    """Returns `stage_ops` whose units have no buckets, as with a single replica."""
    units = []
    for unit_run in stage_ops.unit_runs:
        kept = [use for use in unit_run.fragment.tensor_uses if use.key != HELD]
        units.append(replace(unit_run, fragment=replace(unit_run.fragment, tensor_uses=kept)))
    return replace(stage_ops, unit_runs=units)


def count_whole_elements(scheme: ShardsStates, params: Sequence[Param]) -> int:
    """Returns the elements of whole gradients in memory until their bucket is reduced: with contiguous buffers those of
    the largest, before it is copied or, where it is larger than the buffer, until then."""
    sizes = [param.size for param in params]
    return max(sizes) if scheme.framework.bucket.buffers else sum(sizes)
