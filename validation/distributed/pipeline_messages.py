"""Messages between the devices of a pipeline: a process group for each edge, and sends that no computation waits for.

An *edge* is a sending device, a receiving device and a direction: forward (activations) or backward (gradients). Its
two ranks have a process group for it, on which its messages go through ``batch_isend_irecv``.

On NCCL a process group is a communicator with a stream on each rank. An operation begins when it is at the head of
that stream on both ranks, and holds up all operations that were issued after it. That is so for unbatched sends and
receives, too, if the communicator exists from the start (``init_process_group(device_id=...)``). torch's runtime posts
a receive in the place of its send, often long before the data is needed. Therefore:

- A communicator for the pipeline: a posted receive holds up later sends. It does not deadlock, because all ranks
  issue their operations in a common order, but passes wait for messages that could have left before: interleaved-1f1b
  takes 1.3 times as long on 4 devices and 1.7 times on 8, even if messages take no time. With each receive right before
  its use 1f1b would deadlock: two neighbours send to each other, and each receive is queued behind its send.
- A communicator for each direction: the same where a device both receives and sends in a direction and stages wrap
round
  (interleaved-1f1b, breadth-first) or turn back (zb-v, hanayo).
- A communicator for each edge: an end only sends and the other only receives, both in the order of the sender's
passes, as NCCL
  requires. A message waits for earlier ones of its edge, whose data exist before that of the message, and for nothing
  else; steps take as long as with a stream for each message. Two devices whose stages wrap round are each before and
  after the other: they share four groups.

`tests/validation/distributed/in_order_streams.py` models these streams. A rank belongs to at most four groups in a
chain or ring of devices and to eight where stages turn back. The buffers of their communicators lie outside torch's
allocator and are not part of the measured peaks.

A program of the simulator sends on two streams of each device, ``pipeline-forward`` and ``pipeline-backward``. The
groups of a device's outgoing edges correspond to them, with two differences. Where stages turn back, a device sends to
both neighbours in the same direction: in turn in the program, concurrently here. And NCCL begins a receive
after the computation that was issued before it, while a message of the program needs nothing of its receiver; with
gpipe and breadth-first such a message is not hidden behind a computation of the receiver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed.process_groups import axis_of
from meshcast.validation.measurements.cuda import Cuda

FORWARD, BACKWARD = "pipeline-forward", "pipeline-backward"
"""The directions, by the names of the program's streams."""

Edge = tuple[int, int, str]
"""Sending rank, receiving rank, direction."""


def list_edges(devices: Sequence[int]) -> list[Edge]:
    """Edges of a pipeline.

    devices: the device of each stage.
    """
    pairs = dict.fromkeys(pair for pair in pairwise(devices) if pair[0] != pair[1])
    return list(dict.fromkeys(edge for a, b in pairs for edge in ((a, b, FORWARD), (b, a, BACKWARD))))


def make_edge_groups(plan: Plan) -> dict[Edge, Any]:
    """Makes the groups of all pipelines, and returns those of this rank by their edges, in ranks of the world.

    Collective over all ranks: torch requires every process to create every group.
    """
    axis, groups = axis_of(plan, "pipeline"), dict[Edge, Any]()
    size, stride = plan.mesh.size(axis), plan.mesh.stride(axis)
    edges = list_edges([plan.model_parts.device(stage) for stage in range(plan.shape.stages)])
    for first in (rank for rank in range(plan.mesh.world) if rank // stride % size == 0):
        for source, target, direction in edges:
            pair = first + source * stride, first + target * stride
            group = dist.new_group(list(pair), group_desc=direction)
            if dist.get_rank() in pair:
                groups[*pair, direction] = group
    return groups


class PipelineMessages:
    """Sends and receives of this rank.

    groups: from `make_edge_groups`.
    cuda: the CUDA calls of the device; None on a CPU.
    """

    def __init__(self, groups: Mapping[Edge, Any], cuda: Cuda | None = None) -> None:
        self.groups, self.cuda, self.rank = groups, cuda, dist.get_rank()
        self.streams = {direction: cuda.new_stream() for direction in (FORWARD, BACKWARD)} if cuda is not None else {}
        self.works: dict[str, list[Any]] = {}

    def receive(self, ops: Sequence[dist.P2POp], direction: str) -> list[Any]:
        """Issues receives from a device and returns their works, to be waited for before the data is used."""
        return self._issue(ops, direction)

    def send(self, ops: Sequence[dist.P2POp], direction: str) -> None:
        """Issues sends to a device.

        On a GPU a side stream waits for them. The wait releases the work's references to the tensors, long before
        they have left; `record_stream` keeps the allocator from reusing their memory before the side stream is past the
        wait. On a CPU the process waits for the previous send in the same direction first, as Megatron does, which
        bounds the number of tensors in flight.
        """
        if self.cuda is None:
            self.wait(direction)
            self.works[direction] = self._issue(ops, direction)
            return
        works, stream = self._issue(ops, direction), self.streams[direction]
        with self.cuda.use_stream(stream):
            _wait_for(works)
        for op in ops:
            self.cuda.record_stream(op.tensor, stream)

    def wait(self, *directions: str) -> None:
        """Waits for the latest sends in these directions, in all without directions; not for those of a GPU."""
        for direction in directions or list(self.works):
            _wait_for(self.works.pop(direction, []))

    def _issue(self, ops: Sequence[dist.P2POp], direction: str) -> list[Any]:
        """Issues operations on the group of their edge; torch gives them that of the whole pipeline."""
        batch = [dist.P2POp(op.op, op.tensor, op.peer, self.groups[self._edge(op, direction)]) for op in ops]
        return dist.batch_isend_irecv(batch) if batch else []

    def _edge(self, op: dist.P2POp, direction: str) -> Edge:
        return (self.rank, op.peer, direction) if op.op is dist.isend else (op.peer, self.rank, direction)


def _wait_for(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
