"""Traces a torch module with torch.export: its operators with shapes, and the submodules that call them.

The module lives on the meta device: weights of any size take no memory, and nothing is computed.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from meshcast.experiments.planning.imported.module_graph import ModuleOperator
from meshcast.experiments.planning.imported.operator_works import OperatorCall, PassWorks, TensorShape, list_works
from meshcast.hardware.errors import PlanError

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


class _Region(NamedTuple):
    """A region under other rules (torch.no_grad, torch.autocast): its graph, the values of its placeholders, whether it
    makes no gradients, and the number format of its products; empty: that of their operands."""

    graph: torch.fx.GraphModule
    given: list[Any]
    without: bool
    dtype: str


class _GraphReader:
    """Reads the operators of an exported program."""

    def __init__(self, program: torch.export.ExportedProgram, module: nn.Module, where: str) -> None:
        self.program, self.where = program, where
        tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        named = program.graph_signature.inputs_to_parameters
        self.weights = {node: tensors[named[node.name]] for node in program.graph.nodes if node.name in named}
        self.places: dict[torch.fx.Node, int] = {}
        self.origins: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
        self.gradient: dict[torch.fx.Node, bool] = {}
        self.taken: set[int] = set()

    def read(self) -> Iterator[ModuleOperator]:
        """The operators; views and parts of results stand for what they are of."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                weight = self.weights.get(node)
                self.gradient[node] = weight is not None and weight.requires_grad
                self.origins[node] = (node,)
        yield from self._read_graph(self.program.graph_module, True, "")

    def _read_graph(self, graph: torch.fx.GraphModule, grad: bool, dtype: str) -> Iterator[ModuleOperator]:
        """The operators of a graph whose placeholders are known.

        grad: whether its results may need gradients. dtype: of its products; empty: that of their operands.
        """
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            region = _find_region(graph, node)
            if region is not None:
                yield from self._read_region(node, region, grad, region.dtype or dtype)
                continue
            if not _shapes_of(node):
                continue
            sources = [one for one in _arguments_of(node) if _shapes_of(one)]
            is_float = any(one.dtype in ("fp32", "bf16", "fp16", "fp8") for one in _shapes_of(node))
            self.gradient[node] = grad and is_float and any(self.gradient.get(one, False) for one in sources)
            if _is_view(node):
                origins = (origin for one in sources for origin in self.origins.get(one, ()))
                self.origins[node] = tuple(dict.fromkeys(origins))
                continue
            self.origins[node] = (node,)
            made = self._make(node, sources, dtype)
            if made is not None:
                self.places[node] = len(self.places)
                yield made

    def _read_region(self, node: torch.fx.Node, region: _Region, grad: bool, dtype: str) -> Iterator[ModuleOperator]:
        """The operators of a region, whose results stand for those of the node that calls it."""
        inner = region.graph
        places = [one for one in inner.graph.nodes if one.op == "placeholder"]
        for place, value in zip(places, region.given, strict=True):
            if isinstance(value, torch.fx.Node):
                self.gradient[place] = self.gradient.get(value, False)
                self.origins[place] = self.origins.get(value, ())
        yield from self._read_graph(inner, grad and not region.without, dtype)
        (output,) = (one for one in inner.graph.nodes if one.op == "output")
        results = _arguments_of(output)
        self.origins[node] = tuple(dict.fromkeys(origin for one in results for origin in self.origins.get(one, ())))
        self.gradient[node] = any(self.gradient.get(one, False) for one in results)

    def _make(self, node: torch.fx.Node, sources: list[torch.fx.Node], dtype: str) -> ModuleOperator | None:
        target: Any = node.target
        if not hasattr(target, "_schema"):
            rule = f"{target} runs a graph of its own, whose work is not counted"
            raise PlanError(f"{self.where} {node.name}", rule, "Trace a module without it")
        kind = target._opname.removesuffix("_")
        inputs = tuple(
            shape._replace(needs_gradient=self.gradient.get(one, False)) for one in sources for shape in _shapes_of(one)
        )
        try:
            works: PassWorks = list_works(OperatorCall(kind, inputs, _shapes_of(node), _name_options(node)), dtype)
        except ValueError as error:
            raise PlanError(f"{self.where} {node.name}", str(error), "Trace a module without it") from None
        if not works.forward:
            return None
        if not self.gradient[node]:
            works = PassWorks(works.forward, ())
        reads: dict[int, int] = {}
        own = 0
        for one in sources:
            nbytes = sum(shape.nbytes for shape in _shapes_of(one))
            for origin in self.origins.get(one, ()):
                if origin in self.places:
                    reads[self.places[origin]] = reads.get(self.places[origin], 0) + nbytes
                elif origin in self.weights and id(self.weights[origin]) not in self.taken:
                    self.taken.add(id(self.weights[origin]))
                    own += self.weights[origin].numel() * self.weights[origin].element_size()
        output = sum(shape.nbytes for shape in _shapes_of(node))
        kept = output if self.gradient[node] and not target._opname.endswith("_") else 0
        return ModuleOperator(node.name, _path_of(node), works, tuple(reads.items()), own, output, kept)


def _find_region(graph: torch.fx.GraphModule, node: torch.fx.Node) -> _Region | None:
    """The region that a node calls; None if it calls an operator."""
    name = getattr(node.target, "_name", "") or str(node.target)
    if not name.startswith("wrap_with_"):
        return None
    arguments: list[Any] = [*node.args]
    place = next(at for at, one in enumerate(arguments) if isinstance(one, torch.fx.Node) and one.op == "get_attr")
    inner = getattr(graph, str(arguments[place].target))
    dtype = ""
    if name == "wrap_with_autocast" and arguments[2]:  # the meta device has no autocast, so results do not show it
        dtype = DTYPES.get(arguments[1] or torch.get_autocast_dtype(arguments[0]), "")
    without = name == "wrap_with_set_grad_enabled" and arguments[0] is False
    return _Region(inner, arguments[place + 1 :], without, dtype)


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
