"""torch's pipeline runtime and stages: the only module that uses private names of ``torch.distributed.pipelining``.

What it needs of them beyond the public API:

- ``_PipelineScheduleRuntime`` runs any order of actions, ``_load_csv`` gives it an order, and ``_merge_outputs`` joins
what
  the last stage returned;
- a stage's ``get_fwd_recv_ops``, ``get_bwd_recv_ops``, ``get_fwd_send_ops`` and ``get_bwd_send_ops`` list the messages
  of a micro-batch; ``forward_one_chunk`` and ``backward_one_chunk`` compute its passes;
- ``args_recv_info`` and ``grad_recv_info`` hold a stage's receive buffers, and ``_prepare_forward_infra`` and
  ``_prepare_backward_infra`` allocate them;
- ``dw_builder`` is called after the backward pass of an action B, and what it returns in the action W.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.torch_schedule import TORCH_LETTERS, write_csv
from meshcast.simulator.scheduling.schedule import Action
from meshcast.validation.distributed.pipeline_messages import BACKWARD, FORWARD, PipelineMessages
from meshcast.validation.reference.deferred_weight_gradients import DeferredWeightGradients

VERSIONS = "2.9 to 2.14"
"""Releases of torch that the trainer's pipelines were tested with."""

RUNTIME = "_PipelineScheduleRuntime"
RUNTIME_NAMES = ("_load_csv", "_merge_outputs", "step")
STAGE_NAMES = (
    *("get_fwd_recv_ops", "get_bwd_recv_ops", "get_fwd_send_ops", "get_bwd_send_ops"),
    *("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"),
    *("_prepare_forward_infra", "_prepare_backward_infra"),
)
INSTANCE_NAMES = ("args_recv_info", "grad_recv_info", "dw_builder")

MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""torch's kinds of messages: of activations (F) and of gradients (B)."""

ACTION = re.compile(rf"(\d+)({'|'.join((*TORCH_LETTERS.values(), *MESSAGES))})(\d+)")
"""An action as torch writes it: stage, kind, micro-batch."""


def check() -> None:
    """Raises PlanError if the installed torch lacks what the pipelines use."""
    _require(schedules, [RUNTIME])
    _require(getattr(schedules, RUNTIME), RUNTIME_NAMES)
    _require(PipelineStage, STAGE_NAMES)


def _require(owner: Any, names: Iterable[str]) -> None:
    """Raises PlanError if a module, class or object of torch lacks any of these names."""
    if missing := [name for name in names if not hasattr(owner, name)]:
        whose = getattr(owner, "__name__", type(owner).__name__)
        rule = f"{whose} of torch's pipelining has no {', '.join(missing)}, which the reference trainer needs"
        raise PlanError("torch", rule, f"Install torch {VERSIONS}, or choose pp: 1", torch.__version__)


def make_runtime(
    stages: Sequence[PipelineStage],
    m: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    orders: Sequence[Sequence[Action]],
) -> Any:
    """Makes torch's runtime of a rank's `stages`, to run the `orders` of all devices on m micro-batches.

    Its ``step(*args, **kwargs)`` runs them. The runtime adds sends and receives to the orders.
    """
    check()
    # The loss is divided by m: scaling the gradients instead would take a further kernel.
    runtime = getattr(schedules, RUNTIME)(list(stages), m, loss_fn=loss_fn, scale_grads=False)
    runtime._merge_outputs = lambda losses: None  # it would concatenate the last stage's outputs, which are scalars
    with tempfile.TemporaryDirectory(prefix="meshcast-") as name:
        path = Path(name) / "schedule.csv"
        write_file(path, write_csv(orders))
        runtime._load_csv(str(path), format="compute_only")
    return runtime


def orders_with_messages(runtime: Any) -> list[list[tuple[int, str, int]]]:
    """Orders of all devices as the runtime runs them: stage, kind and micro-batch of each action.

    Kinds of passes are those of `Action`, kinds of messages those of `MESSAGES`.
    """
    kinds = {letter: kind for kind, letter in TORCH_LETTERS.items()} | {kind: kind for kind in MESSAGES}
    orders: list[list[tuple[int, str, int]]] = []
    for _, order in sorted(runtime.pipeline_order_with_comms.items()):
        matches = (ACTION.fullmatch(str(action)) for action in order)  # others are for FSDP, such as 0UNSHARD
        orders.append([(int(match[1]), kinds[match[2]], int(match[3])) for match in matches if match])
    return orders


class LeanPipelineStage(PipelineStage):
    """torch's stage with separate messages, and receive buffers that exist only while a message is in flight.

    torch's runtime would send on the group of the whole pipeline and keep what was sent until the end of the step; its
    stage allocates a buffer for every micro-batch and keeps them from step to step. Here the lists of messages that the
    runtime asks for are empty: the stage gives them to `messages` itself.
    deferred: collector of weight gradients, if the schedule has W actions.
    """

    def __init__(
        self, *args: Any, messages: PipelineMessages, deferred: DeferredWeightGradients | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _require(self, INSTANCE_NAMES)
        self.messages, self.deferred = messages, deferred
        self.dw_builder = deferred.take_work if deferred else None
        self.received: dict[tuple[str, int], list[Any]] = {}
        self.shapes: dict[str, list[Tensor | None]] = {}

    # --------------------------------------------------------------------------------------- messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(FORWARD, self.args_recv_info[fwd_chunk_id])
        ops = super().get_fwd_recv_ops(fwd_chunk_id)
        self.received[FORWARD, fwd_chunk_id] = self.messages.receive(ops, FORWARD)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._allocate(BACKWARD, self.grad_recv_info[bwd_chunk_id])
        ops = super().get_bwd_recv_ops(bwd_chunk_id)
        self.received[BACKWARD, bwd_chunk_id] = self.messages.receive(ops, BACKWARD)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        self.messages.send(super().get_fwd_send_ops(fwd_chunk_id), FORWARD)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        self.messages.send(super().get_bwd_send_ops(bwd_chunk_id), BACKWARD)
        return []

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Lists no messages between neighbours before the first step: torch 2.9 opens connections of `group` so."""
        return []

    def _await(self, direction: str, chunk: int) -> None:
        """Lets the computation wait for what was received for a micro-batch; on a GPU its stream, not the process."""
        for work in self.received.pop((direction, chunk), []):
            work.wait()

    # ----------------------------------------------------------------------------------------- passes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._await(FORWARD, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._await(BACKWARD, bwd_chunk_id)
        with self.deferred.defer(not full_backward) if self.deferred else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps the loss, whose graph would keep the received activations
        self._free(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    # ---------------------------------------------------------------------------------------- buffers

    def clear_runtime_states(self) -> None:
        """Forgets the last step. Receive buffers, in which torch would delete gradients, are gone."""
        self.fwd_cache.clear()
        self.output_chunks.clear()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(*args, **kwargs)
        self._take_over(FORWARD, self.args_recv_info)
        return result

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(*args, **kwargs)
        self._take_over(BACKWARD, self.grad_recv_info)
        return result

    def _take_over(self, direction: str, infos: dict[int, tuple[Any, ...]]) -> None:
        """Keeps the shapes of a micro-batch's buffers, which are the same for all, and frees the buffers."""
        buffers = [getattr(info, "buffer", None) for info in infos[0]]
        self.shapes[direction] = [
            None if buffer is None else torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
            for buffer in buffers
        ]
        self._free(*infos.values())

    def _allocate(self, direction: str, infos: tuple[Any, ...]) -> None:
        for info, like in zip(infos, self.shapes[direction], strict=True):
            if like is not None:
                info.buffer = torch.empty_like(like, device=self.device, requires_grad=like.requires_grad)

    @staticmethod
    def _free(*groups: tuple[Any, ...]) -> None:
        for infos in groups:
            for info in infos:
                info.buffer = None
