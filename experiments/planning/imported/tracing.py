"""Traces a torch module with torch.export: its operators with shapes, and the submodules that call them.

The module lives on the meta device: weights of any size take no memory, and nothing is computed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from experiments.planning.imported.module_graph import ModuleOperator
from experiments.planning.imported.operator_works import OperatorCall, PassWorks, TensorShape, list_works
from hardware.errors import PlanError

DTYPES = {
    **{torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"},
    **{torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"},
}
"""Number formats that kernels are priced in; all others move bytes."""


def trace_module(make: Callable[[], Any], where: str) -> list[ModuleOperator]:
    """The operators of a module in the order of their execution.

    make: returns the module and a tuple of inputs (or a dict of keyword inputs); it is called under the meta device.
    where: named in errors.

    Raises PlanError if `make` fails, returns something else, or torch.export cannot trace the module.
    """
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        rule = f"it fails on the meta device: {type(error).__name__}: {error}"
        raise PlanError(where, rule, "Return a module and its inputs, and read no values of tensors") from None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        rule = f"it returns {type(made).__name__}, not a pair of a torch.nn.Module and its inputs"
        raise PlanError(where, rule, "Write: return model, (tokens,)")
    module, inputs = made[0].to("meta"), made[1]
    named = inputs if isinstance(inputs, dict) else {}
    positional = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(module, positional, named, strict=False)
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = "Make control flow independent of the values of tensors, see pytorch.org/docs/stable/export.html"
        raise PlanError(where, f"torch.export cannot trace it: {lines[0]}", remedy) from None
    return [*_GraphReader(program, module, where).read()]


class _GraphReader:
    """Reads the operators of an exported program."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module, where: str) -> None:
        self.program, self.where = program, where
        signature = program.graph_signature
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        self.weights = {name: tensors[target] for name, target in signature.inputs_to_parameters.items()}
        self.places: dict[str, int] = {}
        self.origins: dict[str, tuple[str, ...]] = {}
        self.gradient: dict[str, bool] = {}
        self.taken: set[int] = set()

    def read(self) -> Iterator[ModuleOperator]:
        """The operators; views and parts of results stand for what they are of."""
        for node in self.program.graph.nodes:
            sources = [one for one in _arguments_of(node) if _shapes_of(one)]
            if node.op == "placeholder":
                weight = self.weights.get(node.name)
                self.gradient[node.name] = weight is not None and weight.requires_grad
                self.origins[node.name] = (node.name,)
                continue
            if node.op != "call_function" or not _shapes_of(node):
                continue
            is_float = any(one.dtype in ("fp32", "bf16", "fp16", "fp8") for one in _shapes_of(node))
            self.gradient[node.name] = is_float and any(self.gradient.get(one.name, False) for one in sources)
            if _is_view(node):
                self.origins[node.name] = tuple(
                    dict.fromkeys(origin for one in sources for origin in self.origins[one.name])
                )
                continue
            self.origins[node.name] = (node.name,)
            made = self._make(node, sources)
            if made is not None:
                self.places[node.name] = len(self.places)
                yield made

    def _make(self, node: torch.fx.Node, sources: list[torch.fx.Node]) -> ModuleOperator | None:
        kind = getattr(node.target, "_opname", str(node.target)).removesuffix("_")
        inputs = tuple(
            shape._replace(needs_gradient=self.gradient[one.name]) for one in sources for shape in _shapes_of(one)
        )
        try:
            works: PassWorks = list_works(OperatorCall(kind, inputs, _shapes_of(node), _name_options(node)))
        except ValueError as error:
            raise PlanError(f"{self.where} {node.name}", str(error), "Trace a module without it") from None
        if not works.forward:
            return None
        reads: dict[int, int] = {}
        own = 0
        for one in sources:
            nbytes = sum(shape.nbytes for shape in _shapes_of(one))
            for origin in self.origins[one.name]:
                if origin in self.places:
                    reads[self.places[origin]] = reads.get(self.places[origin], 0) + nbytes
                elif origin in self.weights and id(self.weights[origin]) not in self.taken:
                    self.taken.add(id(self.weights[origin]))
                    own += self.weights[origin].numel() * self.weights[origin].element_size()
        output = sum(shape.nbytes for shape in _shapes_of(node))
        in_place = str(node.target).split(".")[1].endswith("_") if hasattr(node.target, "_schema") else False
        kept = output if self.gradient[node.name] and not in_place else 0
        return ModuleOperator(node.name, _path_of(node), works, tuple(reads.items()), own, output, kept)


def _arguments_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that a node reads, in the order of its arguments, those that it reads twice included."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _path_of(node: torch.fx.Node) -> tuple[str, ...]:
    """The names of the submodules in which an operator is called."""
    stack = node.meta.get("nn_module_stack") or {}
    path = [*stack.values()][-1][0] if stack else ""
    return tuple(part for part in str(path).split(".") if part)


def _shapes_of(node: torch.fx.Node) -> tuple[TensorShape, ...]:
    """The tensors of a node's value."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    return tuple(
        TensorShape(tuple(int(size) for size in one.shape), DTYPES.get(one.dtype, str(one.dtype)), one.element_size())
        for one in tensors
    )


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a node shows the memory of others: a view, or a part of several results."""
    if node.target is operator.getitem:
        return True
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    formats = {shape.dtype for one in (node, *_arguments_of(node)) for shape in _shapes_of(one)}
    if len(formats) > 1:  # a cast copies, though its schema admits a view
        return False
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _name_options(node: torch.fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names in the schema, defaults included."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    given = {one.name: value for one, value in zip(arguments, node.args, strict=False)}
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return {**defaults, **given, **node.kwargs}
