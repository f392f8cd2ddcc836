"""What the processes of the tests run: steps of a pipeline whose messages and waits are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.loading.load import load_job
from meshcast.validation.distributed.pipeline_messages import BACKWARD, FORWARD
from meshcast.validation.distributed.process_groups import make_process_groups
from meshcast.validation.distributed.serial_check import compare_with_serial
from meshcast.validation.distributed.trainer import Trainer
from meshcast.validation.measurements.device import Device
from tests.validation.reference.ranks import gloo_group


class RecordedCuda:
    """Stands in for the CUDA calls of a device: streams are names, and what runs on them is recorded."""

    def __init__(self) -> None:
        self.names = iter((FORWARD, BACKWARD))
        self.current = "compute"
        self.kept: list[tuple[Any, str]] = []

    def new_stream(self) -> str:
        return next(self.names)

    def current_stream(self) -> str:
        return self.current

    @contextmanager
    def use_stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record_stream(self, tensor: Any, stream: str) -> None:
        self.kept.append((tensor, stream))


class CpuWithCuda:
    """A CPU whose `cuda` is given."""

    def __init__(self, device: Device, cuda: RecordedCuda | None) -> None:
        self.device, self.cuda = device, cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


class Recorder:
    """Records the operations of batches, those outside of any, and on which stream each is waited for."""

    def __init__(self, cuda: RecordedCuda | None) -> None:
        self.cuda = cuda
        self.groups: Mapping[Any, Any] = {}
        self.batched: list[tuple[str, Any]] = []
        self.waits: list[tuple[str, str]] = []
        self.unbatched = self.sends = self.most_sends = 0
        self.inside = False
        self.left: list[Any] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Takes the place of torch's operations; `P2POp` knows them by identity, under both of their names."""
        for name in ("isend", "irecv"):
            counted = self._count(getattr(dist, name), name)
            for module in (dist, dist.distributed_c10d):
                patch.setattr(module, name, counted)
        self.batch = dist.batch_isend_irecv
        patch.setattr(dist, "batch_isend_irecv", self.batch_isend_irecv)

    def _count(self, operation: Any, name: str) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.unbatched += not self.inside
            return operation(*arguments, **options)

        counted.__name__ = name
        return counted

    def batch_isend_irecv(self, ops: list[Any]) -> list[Any]:
        edges = [next((edge for edge, group in self.groups.items() if group is op.group), None) for op in ops]
        self.batched += [(op.op.__name__, edge) for op, edge in zip(ops, edges, strict=True)]
        self.inside = True
        works = self.batch(ops)
        self.inside = False
        sends = sum(op.op.__name__ == "isend" for op in ops)
        self.sends += sends
        self.most_sends = max(self.most_sends, self.sends)
        return [RecordedWork(self, work, op.op.__name__) for work, op in zip(works, ops, strict=True)]


class RecordedWork:
    def __init__(self, recorder: Recorder, work: Any, name: str) -> None:
        self.recorder, self.work, self.name = recorder, work, name

    def wait(self) -> None:
        """Waits, unless on a side stream, where a process of a GPU would not wait either."""
        recorder = self.recorder
        stream = recorder.cuda.current if recorder.cuda else "compute"
        recorder.waits.append((self.name, stream))
        recorder.sends -= self.name == "isend"
        if stream == "compute":
            self.work.wait()
        else:
            recorder.left.append(self.work)


@gloo_group()
def record_steps(jobs: Mapping[tuple[str, bool], Any], rank: int) -> dict[tuple[str, bool], Any]:
    """Records the second step of each job, by its name and whether CUDA calls are recorded; the first one also agrees
    on the shapes of messages."""
    recorder = Recorder(None)
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        return {case: record_step(recorder, job, with_cuda=case[1]) for case, job in jobs.items()}


def record_step(recorder: Recorder, job: Mapping[str, Any], with_cuda: bool) -> dict[str, Any]:
    """Records the second step of a job."""
    cuda = RecordedCuda() if with_cuda else None
    plan = resolve_plan(load_job(job))
    place = make_process_groups(plan, Device.of("cpu"))
    trainer = Trainer(plan, replace(place, device=CpuWithCuda(place.device, cuda)))  # type: ignore[arg-type]
    recorder.cuda, recorder.groups = cuda, trainer.passes.messages.groups  # type: ignore[attr-defined]
    equal = compare_with_serial(trainer).equal
    recorder.batched, recorder.waits, recorder.unbatched, recorder.most_sends = [], [], 0, 0
    if cuda:
        cuda.kept.clear()
    trainer.accumulate_gradients(trainer.make_inputs(1))
    while recorder.left:
        recorder.left.pop(0).wait()
    counts = {name: copy(getattr(recorder, name)) for name in ("batched", "unbatched", "waits", "most_sends")}
    return {**counts, "equal": equal, "kept": [stream for _, stream in cuda.kept] if cuda else []}
