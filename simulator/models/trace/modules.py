"""Traces the model that a function of an installed package makes."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.trace.folding import ModuleTrace
from meshcast.simulator.models.trace.tracer import Recorder, trace


def trace_function(package: str, function: str, where: str) -> ModuleTrace:
    """Returns the trace of the module that `function` of `package` makes, which takes token ids [1, tokens].

    Raises ModelError if there is no such function, or if it makes no module that can be traced.
    """

    def make(_: Recorder) -> nn.Module:
        try:
            module = getattr(import_module(package), function)()
        except AttributeError as error:
            raise ModelError(where, f"{package} has no such function: {error}", "Correct the name", function) from None
        if not isinstance(module, nn.Module):
            rule = f"it makes a {type(module).__name__}, and a torch.nn.Module is needed"
            raise ModelError(where, rule, "Name a function without arguments that makes one", function)
        return module

    try:
        return trace(make)
    except ModelError:
        raise
    except Exception as error:  # of code that is not ours
        rule = f"its forward pass over token ids [1, tokens] without weights fails: {type(error).__name__}: {error}"
        raise ModelError(where, rule, "Give the fields of `model:` themselves", f"{package}:{function}") from None
