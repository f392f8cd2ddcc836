"""Runs the forward pass of a PyTorch module without weights, and tells what runs.

Tensors are fake (`torch._subclasses.fake_tensor`): they have shapes and no data, so that a model of any size is traced
in seconds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from meshcast.simulator.models.trace.folding import ModuleTrace, TraceEvent
from meshcast.simulator.models.trace.record import Step, Work
from meshcast.simulator.models.trace.values import KnownValues, list_tensors

TOKENS = 128
"""Tokens of the only sequence that is traced."""

FIRST_ID = 128
"""The first of these; smaller ids often have a meaning, such as padding."""

NORMALISING = {"native_layer_norm", "_fused_rms_norm", "rsqrt", "native_group_norm"}
"""Operators that only norms have."""

SHIFTED = "add to weight"
"""The mark of norms that store their weight - 1."""

ADDING = {"add", "add_"}

COPYING = {"_to_copy", "clone", "mul", "div", "native_dropout"}
"""Operators that, of a single tensor, leave what it is: another format, a factor."""

ROTATING = {"neg", "view_as_complex"}
"""Operators of rotary embeddings, over half of the elements that are rotated."""

MULTIPLYING = {"bmm", "mm", "baddbmm"}

RATES = ("A_log", "dt_bias")
"""Parameters of recurrences, whose modules say some of their sizes in numbers alone."""

SIZES = ("n_groups", "ngroups", "num_groups", "chunk_size")
"""These numbers."""


class Recorder(TorchDispatchMode):
    """Records operators by the module that runs them.

    parameters: name of each parameter by its memory.
    path: names of the modules that run, the innermost last.
    work: FLOPs, bytes moved and bytes of results by module.
    operators: names of the operators by module.
    events: what ran, in order.
    kept: results of all operators, so that no memory is used twice.
    values: of the tensors that have any.
    in_attention: whether attention runs that is recorded as a whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, str] = {}
        self.path: list[str] = [""]
        self.work: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.operators: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.events: list[Step | TraceEvent] = []
        self.kept: list[torch.Tensor] = []
        self.values = KnownValues()
        self.in_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = self.values.run(func, args, kwargs)
        counted = packet in flop_registry and not self.in_attention
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result)) if counted else 0.0
        self._record(packet.__name__, list_tensors((args, kwargs)), list_tensors(result), flops)
        return result

    def _record(self, name: str, ins: list[torch.Tensor], outs: list[torch.Tensor], flops: float) -> None:
        """Records an operator."""
        module, read = self.path[-1], {memory_of(tensor) for tensor in ins}
        fresh = [tensor for tensor in outs if memory_of(tensor) not in read]
        self.kept += outs
        if not fresh and not name.endswith("_"):  # a view
            return
        self.operators[module][name] += 1
        results = sum(bytes_of(tensor) for tensor in fresh if tensor.is_floating_point())
        self.add_work(flops, sum(map(bytes_of, (*ins, *outs))), results)
        if not self.in_attention and (step := self._read_step(name, ins, outs[0], flops)):
            self.events.append(step)
        for tensor in fresh:
            self._follow(name, ins, memory_of(tensor))

    def add_work(self, *amounts: float) -> None:
        """Adds FLOPs, bytes moved and bytes of results to the work of the module that runs."""
        for i, amount in enumerate(amounts):
            self.work[self.path[-1]][i] += amount

    def _read_step(self, name: str, ins: Sequence[torch.Tensor], out: torch.Tensor, flops: float) -> Step | None:
        """Returns the step that an operator is, if it is any."""
        module = self.path[-1]
        weights = [tensor for tensor in ins if memory_of(tensor) in self.parameters and tensor.dim() > 1]
        if flops and weights:
            rows = out.numel() // out.shape[-1]
            inner, name = round(flops / (2 * out.numel())), self.parameters[memory_of(weights[0])]
            return Step("product", module, name, rows, inner, out.shape[-1], flops)
        if name in MULTIPLYING:
            first, second = ins[-2:]
            batch = first.shape[0] if first.dim() > 2 else 1
            return Step("matmul", module, sizes=(batch, first.shape[-2], second.shape[-1], first.shape[-1]))
        if name == "_softmax":
            return Step("softmax", module, sizes=tuple(out.shape))
        if name == "tanh" and not module:
            return Step("cap", module, width=out.shape[-1])
        if name in ROTATING and ins[0].dim() > 3:
            return Step("rotation", module, width=2 * ins[0].shape[-1])
        return None

    def _follow(self, name: str, ins: Sequence[torch.Tensor], result: int) -> None:
        """Follows parameters and the residual stream through an operator. result: the memory of its result."""
        known = {self.parameters.get(memory_of(tensor)) for tensor in ins}
        sources = tuple(memory_of(tensor) for tensor in ins if tensor.dim())
        if len(known) == 1 and (parameter := known.pop()):  # a copy of a parameter, or a function of it
            self.parameters[result] = parameter
            if name in ADDING:
                self.operators[self.path[-1]][SHIFTED] += 1
        elif name in ADDING and len(sources) == 2:
            self.events.append(TraceEvent("sum", reads=sources, writes=result))
        elif name in COPYING and len(sources) == 1:
            self.events.append(TraceEvent("copy", reads=sources, writes=result))

    # ------------------------------------------------------------------------- what is recorded as a whole

    @contextmanager
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, like: Step | None = None
    ) -> Iterator[None]:
        """Records attention by the shapes [..., heads, tokens, width] of its inputs, whatever runs within.

        like: its window and other flags.
        """
        (heads, tokens, qk), v = query.shape[-3:], value.shape[-1]
        step = replace(like or Step("attention", ""), module=self.path[-1], heads=heads, kv_heads=key.shape[-3])
        self.events.append(replace(step, qk=qk, v=v))
        self.add_work(2.0 * heads * tokens * key.shape[-2] * (qk + v))
        self.in_attention = True
        try:
            yield
        finally:
            self.in_attention = False

    def add_experts(self, module: nn.Module, hidden: torch.Tensor, top_k: int) -> None:
        """Records routed experts, whose weights have a dim of experts in front."""
        rows = hidden.numel() // hidden.shape[-1]
        weights = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
        matrices = [weight for weight in module.parameters(recurse=False) if weight.dim() > 2]
        flops = sum(2.0 * rows * top_k * weight.numel() / weight.shape[0] for weight in matrices)
        self.add_work(flops)
        self.events.append(Step("experts", self.path[-1], rows=rows, flops=flops, top_k=top_k, weights=weights))

    def enter(self, name: str, module: nn.Module, arguments: object) -> None:
        """Begins a module of the model."""
        self.path.append(name)
        if any(key.endswith(RATES) for key, _ in module.named_parameters(recurse=False)):
            numbers = {key: value for key, value in vars(module).items() if key in SIZES and isinstance(value, int)}
            self.events.append(Step("recurrence", name, numbers=numbers))
        stream = next(iter(list_tensors(arguments)), torch.empty(()))
        width = stream.shape[-1] if stream.dim() else 0
        rows = stream.numel() // max(width, 1)
        self.events.append(TraceEvent("enter", name, (memory_of(stream),), width=width, rows=rows))

    def leave(self) -> None:
        """Ends the innermost module."""
        self.events.append(TraceEvent("leave", self.path.pop()))


class AttentionCalls(TorchFunctionMode):
    """Records the calls of PyTorch's attention."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not self.recorder.in_attention:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
            with self.recorder.attend(query, key, value):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def memory_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others; views have that of their base."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def trace(make: Callable[[Recorder], nn.Module]) -> ModuleTrace:
    """Builds a module on fake tensors and runs it over token ids; returns what is known then.

    make: builds the module. The recorder is for functions that stand for parts of it.
    """
    recorder = Recorder()
    ids = torch.arange(FIRST_ID, FIRST_ID + TOKENS)[None]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        with allow_casts(mode):
            model = make(recorder).eval()
        for name, parameter in model.named_parameters():
            recorder.parameters.setdefault(memory_of(parameter), name)
        fake_ids = recorder.values.add(torch.empty_like(ids), ids)
        with watch_modules(model, recorder), recorder, AttentionCalls(recorder):
            run(model, fake_ids)
    normalising = {name for name, operators in recorder.operators.items() if NORMALISING & operators.keys()}
    return ModuleTrace(
        tokens=TOKENS,
        classes={name: type(module).__name__ for name, module in model.named_modules()},
        parameters={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        events=recorder.events,
        work={name: Work(*work) for name, work in recorder.work.items()},
        norms={name: SHIFTED in recorder.operators[name] for name in normalising},
        dropout=max((module.p for module in model.modules() if isinstance(module, nn.Dropout)), default=0.0),
    )


@contextmanager
def allow_casts(mode: FakeTensorMode) -> Iterator[None]:
    """Lets modules be cast, which PyTorch refuses while a fake mode remembers how it made their parameters."""
    swap = torch.utils.swap_tensors
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo

    def forget_and_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        memo.clear()
        swap(first, second)

    torch.utils.swap_tensors = forget_and_swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def run(model: nn.Module, ids: torch.Tensor) -> None:
    """Runs the forward pass of a module over token ids. Models of sounds may read those of several codebooks at once, a
    row for each."""
    config = getattr(model, "config", None)
    ids = ids.expand(getattr(model, "num_codebooks", 1), -1)
    if config is None:
        model(ids)
    elif getattr(config, "use_cache", None) is None:
        model(input_ids=ids)
    else:
        model(input_ids=ids, use_cache=False)


@contextmanager
def watch_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tells the recorder when each module begins and ends."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                before = module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: recorder.enter(name, module, (args, kwargs)),
                    with_kwargs=True,
                )
                after = module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
