"""Runs the forward pass of a PyTorch module without weights, and records what its layers are made of.

Tensors are fake (`torch._subclasses.fake_tensor`): they have shapes and no data, so that a model of any size is traced
in seconds. The record is plain data, which is read without torch (`simulator.models.trace.record`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from meshcast.simulator.models.trace.record import Trace, Work

TOKENS = 128
"""Tokens of the only sequence that is traced."""

NORMALISING = {"native_layer_norm", "_fused_rms_norm", "rsqrt", "native_group_norm"}
"""Operators that only norms have."""

SHIFTED = "add to weight"
"""The mark of norms that store their weight - 1."""

ADDING = {"add", "add_"}

ROTATING = {"neg", "view_as_complex"}
"""Operators of rotary embeddings, over half of the elements that are rotated."""

RATES = ("A_log", "dt_bias")
"""Parameters of recurrences, whose modules say some of their sizes in numbers alone."""

SIZES = ("n_groups", "ngroups", "num_groups", "chunk_size")
"""These numbers."""

COPYING = {"_to_copy", "clone", "mul", "div", "native_dropout"}
"""Operators that, of a single tensor, leave what it is: another format, a factor."""

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Recorder(TorchDispatchMode):
    """Records operators by the module that runs them.

    in_attention: whether attention that is recorded already runs.
    names: name of each parameter by its storage.
    path: names of the modules that run, the innermost last.
    work: FLOPs, bytes moved and bytes of results by module.
    operators: names of the operators by module.
    steps: products with parameters, norms and attention in order, each with its module.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.path: list[str] = [""]
        self.work: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.operators: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.steps: list[dict[str, Any]] = []
        self.kept: list[torch.Tensor] = []
        self.in_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in flop_registry and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._record(func, packet, args, kwargs, result)
        return result

    def _record(self, func: Any, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, module = packet.__name__, self.path[-1]
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.kept += outs  # so that no storage is used twice
        before = {storage_of(tensor) for tensor in ins}
        fresh = [tensor for tensor in outs if storage_of(tensor) not in before]
        counted = packet in flop_registry and not self.in_attention
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result)) if counted else 0.0
        parameters = [self.names.get(storage_of(tensor), "") for tensor in ins]
        if fresh or name.endswith("_"):
            moved = sum(map(bytes_of, ins)) + sum(map(bytes_of, outs))
            work = self.work[module]
            for i, amount in enumerate((flops, moved, sum(bytes_of(t) for t in fresh if t.dtype in STORED))):
                work[i] += amount
            self.operators[module][name] += 1
        if flops and any(parameters):
            self._add_product(module, parameters, ins, outs[0], flops)
        elif name in ("bmm", "mm", "baddbmm"):
            first, second = ins[-2:]
            batch = first.shape[0] if first.dim() == 3 else 1
            sizes = {"batch": batch, "m": first.shape[-2], "k": first.shape[-1], "n": second.shape[-1]}
            self.steps.append({"step": "matmul", "module": module, **sizes})
        elif name == "_softmax":
            self.steps.append({"step": "softmax", "module": module, "sizes": list(outs[0].shape)})
        elif name in ROTATING and ins[0].dim() > 3:
            self.steps.append({"step": "rotation", "module": module, "width": 2 * ins[0].shape[-1]})
        sources = [storage_of(tensor) for tensor in ins if tensor.dim()]
        for tensor in fresh:
            if parameters and all(parameters) and len({*parameters}) == 1:
                self.names[storage_of(tensor)] = parameters[0]  # a copy of a parameter, or a function of it
                if name == "add":
                    self.operators[module][SHIFTED] += 1
            elif name in ADDING and len(sources) == 2:
                self.steps.append({"step": "sum", "of": sources, "to": storage_of(tensor)})
            elif name in COPYING and len(sources) == 1:
                self.steps.append({"step": "copy", "of": sources[0], "to": storage_of(tensor)})

    def _add_product(
        self, module: str, parameters: list[str], ins: list[torch.Tensor], out: torch.Tensor, flops: float
    ) -> None:
        matrix = next(i for i, name in enumerate(parameters) if name and ins[i].dim() > 1)
        width = out.shape[-1]
        rows = out.numel() // width
        self.steps.append(
            {
                "step": "product",
                "module": module,
                "parameter": parameters[matrix],
                "rows": rows,
                "inner": round(flops / (2 * rows * width)),
                "outer": width,
                "flops": flops,
            }
        )

    @contextmanager
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **flags: Any) -> Iterator[None]:
        """Records attention by the shapes [..., heads, tokens, width] of its inputs, whatever runs within."""
        shape = {"heads": query.shape[-3], "kv_heads": key.shape[-3], "qk": query.shape[-1], "v": value.shape[-1]}
        tokens = {"queries": query.shape[-2], "keys": key.shape[-2]}
        self.steps.append({"step": "attention", "module": self.path[-1], **shape, **tokens, **flags})
        pairs = 2.0 * tokens["queries"] * tokens["keys"] * shape["heads"]
        self.work[self.path[-1]][0] += pairs * (shape["qk"] + shape["v"])
        self.in_attention = True
        yield
        self.in_attention = False

    def add_experts(self, module: nn.Module, hidden: torch.Tensor, top_k: int) -> None:
        """Records routed experts, whose weights have a dim of experts in front."""
        rows = hidden.numel() // hidden.shape[-1]
        shapes = {name: list(weight.shape) for name, weight in module.named_parameters(recurse=False)}
        flops = sum(
            2.0 * rows * top_k * weight.numel() / weight.shape[0]
            for weight in module.parameters(False)
            if weight.dim() == 3
        )
        self.work[self.path[-1]][0] += flops
        self.steps.append(
            {
                "step": "experts",
                "module": self.path[-1],
                "top_k": top_k,
                "weights": shapes,
                "rows": rows,
                "flops": flops,
            }
        )

    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begins a module of the model."""
        self.path.append(name)
        if any(key.endswith(RATES) for key, _ in module.named_parameters(recurse=False)):
            numbers = {key: value for key, value in vars(module).items() if key in SIZES and isinstance(value, int)}
            self.steps.append({"step": "recurrence", "module": name, "numbers": numbers})
        stream = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        self.steps.append(
            {
                "step": "enter",
                "module": name,
                "width": stream.shape[-1] if stream is not None and stream.dim() else 0,
                "rows": stream.numel() // stream.shape[-1]
                if stream is not None and stream.dim() and stream.numel()
                else 0,
                "of": storage_of(stream) if stream is not None else 0,
            }
        )

    def leave(self) -> None:
        """Ends the innermost module."""
        self.steps.append({"step": "leave", "module": self.path.pop()})


class AttentionCalls(TorchFunctionMode):
    """Records the calls of PyTorch's attention."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and not self.recorder.in_attention:
            query, key, value = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
            with self.recorder.attend(query, key, value, window=None, softcap=False, sinks=False, causal=True):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others; views have that of their base."""
    return int(tensor.untyped_storage()._cdata)


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def trace(make: Callable[[Recorder], nn.Module]) -> Trace:
    """Builds a module on fake tensors and runs it over token ids; returns what is known then.

    make: builds the module. The recorder is for functions that stand for parts of it.
    """
    names: dict[int, str] = {}
    recorder = Recorder(names)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = make(recorder).eval()
        for name, parameter in model.named_parameters():
            names.setdefault(storage_of(parameter), name)
        ids = torch.zeros((1, TOKENS), dtype=torch.long)
        with watch_modules(model, recorder), recorder, AttentionCalls(recorder):
            run(model, ids)
    normalising = {name for name, operators in recorder.operators.items() if NORMALISING & operators.keys()}
    return Trace(
        tokens=TOKENS,
        classes={name: type(module).__name__ for name, module in model.named_modules()},
        parameters={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        steps=recorder.steps,
        work={name: Work(*work) for name, work in recorder.work.items()},
        norms={name: SHIFTED in recorder.operators[name] for name in normalising},
    )


def run(model: nn.Module, ids: torch.Tensor) -> None:
    """Runs the forward pass of a module over token ids."""
    config = getattr(model, "config", None)
    if config is None:
        model(ids)
    else:
        model(input_ids=ids, use_cache=False) if getattr(config, "use_cache", None) is not None else model(
            input_ids=ids
        )


@contextmanager
def watch_modules(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tells the recorder when each module begins and ends."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                before = module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: recorder.enter(name, module, args, kwargs),
                    with_kwargs=True,
                )
                after = module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
