"""Traces the model of a Hugging Face config with the classes of an installed ``transformers``.

Code that a checkpoint brings (``auto_map``, ``trust_remote_code``) is not loaded.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.trace.folding import ModuleTrace
from meshcast.simulator.models.trace.record import Step
from meshcast.simulator.models.trace.tracer import Recorder, trace

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "meshcast"
"""The name under which attention and experts are registered that record their shapes."""

LEFT_OUT = ("model_type", "auto_map", "quantization_config")
"""Keys of a config that do not say what its model is made of."""

ATTEMPTS = ((True, torch.bfloat16), (False, torch.bfloat16), (False, None))
"""How a model is built, in turn: whether attention and experts record their shapes, and its number format. Some models
run with their own attention and experts alone, and some in the format of their config."""


def trace_type(config: Mapping[str, Any], where: str) -> ModuleTrace:
    """Returns the trace of the model of a config.

    Raises ModelError if transformers has no code for it, or if that cannot be traced.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config["model_type"]
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rule = f"transformers {__version__} has no causal language model of this type"
        remedy = "Does an installed package have its code? Then give `model: {module: package.file:function, seq: ...}`"
        if config.get("auto_map"):
            rule += ", and code that comes with a model (auto_map) is not run"
        raise ModelError(where, rule, f"{remedy}; or give the fields of `model:` themselves", kind)
    causes = list[str]()
    for recording, dtype in ATTEMPTS:
        try:
            with silence():
                return trace(partial(_make_model, config, recording, dtype))
        except Exception as error:  # of code that is not ours
            causes.append(f"{type(error).__name__}: {error}")
    rule = f"the code of transformers {__version__} cannot be traced with this config: {causes[0]}"
    raise ModelError(where, rule, "Give the fields of `model:` themselves", kind)


@contextmanager
def silence() -> Iterator[None]:
    """Leaves out the warnings of a trace: they are about kernels and settings that do not matter to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _make_model(config: Mapping[str, Any], recording: bool, dtype: torch.dtype | None, recorder: Recorder) -> nn.Module:
    """Builds the causal language model of a config. recording, dtype: see `ATTEMPTS`."""
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[config["model_type"]]
    values = {key: value for key, value in config.items() if key not in LEFT_OUT}
    options: dict[str, Any] = {"dtype": dtype} if dtype else {}
    if recording:
        _register(recorder)
        options |= {"attn_implementation": NAME, "experts_implementation": NAME}
    with no_init_weights():
        settings = kind(**kind._decode_special_floats(values))
        return _build(settings, options)


def _build(settings: PretrainedConfig, options: Mapping[str, object]) -> nn.Module:
    """Builds the causal language model of a config; it may be made of a part of it, such as the decoder of MusicGen."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    parts = [part for part in vars(settings).values() if isinstance(part, kind.config_class)]
    if parts and not isinstance(settings, kind.config_class):
        model = kind._from_config(parts[0], **options)
    else:
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False, **options)
    model.tie_weights()
    return model


def _register(recorder: Recorder) -> None:
    """Registers attention and experts that record their shapes."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        window, causal = (
            options.get("sliding_window", getattr(module, "sliding_window", None)),
            options.get("is_causal"),
        )
        like = Step(
            "attention",
            "",
            window=window if isinstance(window, int) else None,
            softcap=options.get("softcap") is not None,
            sinks=options.get("s_aux") is not None,
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
        )
        with recorder.attend(query, key, value, like):
            groups = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
            result = nn.functional.scaled_dot_product_attention(query, key, value)
        return result.transpose(1, 2).contiguous(), None

    def route(module: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        recorder.add_experts(module, hidden, chosen.shape[-1])
        return torch.empty_like(hidden)

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_EXPERTS_FUNCTIONS.register(NAME, route)
