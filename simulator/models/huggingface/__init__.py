"""Reads the ``config.json`` of a Hugging Face model.

Each supported ``model_type`` has a class (in `gpt`, `llama`, `gemma`, `moe`, `linear` ...) that states the keys it
reads, their defaults (those of the ``transformers`` library, release 4.57), the supported values, and the model.
Widths and counts that define a model have no default. Keys that do not change the cost of a step (token ids,
generation, initialisation, base and scaling of RoPE) are ignored. A key that does change it is read, or refused if its
value is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshcast.hardware.errors import ModelError, nearest
from meshcast.simulator.models.huggingface.heads import read_head
from meshcast.simulator.models.huggingface.readers import DIFFUSERS, SUPPORTED, find_reader
from meshcast.simulator.models.model import Model, error_place, explain_errors

__all__ = ["SUPPORTED", "from_config"]

ENCODER_DECODERS = frozenset({"pegasus_x", "prophetnet", "fsmt", "switch_transformers", "nllb-moe", "moonshine"})
"""Kinds of encoders with decoders that are not read."""

BITS = "bits", "num_bits"
"""Keys of the bits of a quantised weight."""

UNDESCRIBED = {
    "hrm_text": "layers that a token passes several times",
    "zaya": "attention between convolved latents, and routers of several linear layers,",
}
"""What fields of `Model` cannot describe, by the kinds of models that have it."""


def from_config(
    config: Mapping[str, Any], where: str = "config.json", name: str | None = None, text: str = ""
) -> Model:
    """Returns the model that a Hugging Face config describes.

    Args:
        config: the parsed ``config.json``.
        where: its place, for error messages.
        name: name of the model in reports; default: the config's ``_name_or_path``, else its ``model_type``.
        text: the text of the file, for the line numbers of error messages.

    Raises:
        ModelError: another ``model_type``, a missing key, or a value that meshcast does not support.
    """
    if not isinstance(config, Mapping):
        raise ModelError(where, "a Hugging Face config is a mapping", "Give the path of a config.json", config)
    kind, of_diffusers = config.get("model_type"), config.get("_class_name")
    if kind is None and isinstance(of_diffusers, str):
        if of_diffusers not in DIFFUSERS:
            rule = "meshcast does not describe this model of diffusers"
            raise ModelError(
                error_place(where, "_class_name", text), rule, nearest(of_diffusers, DIFFUSERS), of_diffusers
            )
        kind = of_diffusers
    named = {"name": name or str(config.get("_name_or_path") or kind)}
    if not isinstance(kind, str) or kind not in SUPPORTED | DIFFUSERS:
        fields = _trace(config, where, text) if isinstance(kind, str) and kind not in ENCODER_DECODERS else None
        if not fields:
            raise _explain_kind(kind, error_place(where, "model_type", text))
        return Model.model_validate({**named, **_add_quantisation(fields, config)})
    reader = find_reader(kind)
    with explain_errors(where, text, reader.config_keys()):
        fields = reader.model_validate(config).fields()
        fields |= read_head(config, reader.__name__, fields)
        return Model.model_validate({**named, **_add_quantisation(fields, config)})


def _add_quantisation(fields: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model with the number formats of its checkpoint, which are no part of its shape, among
    what is left out: the config's own, or those of its decoder."""
    text = config.get("text_config")
    parts = [part.get("quantization_config") for part in (config, text) if isinstance(part, Mapping)]
    formats = next((_name_format(part) for part in parts if part), None)
    if formats is None:
        return fields
    others = "in place of which precision and train.frozen_weights stand"
    part = f"the quantisation of the checkpoint ({formats}), {others}, is"
    return fields | {"left_out": (*fields.get("left_out", ()), part)}


def _name_format(quantisation: object) -> str:
    """Names a quantised format by the words of its config: method, algorithm or bits."""
    if not isinstance(quantisation, Mapping):
        return str(quantisation)
    groups = quantisation.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    bits = [part.get(word) for part in (quantisation, weights) if isinstance(part, Mapping) for word in BITS]
    words = [quantisation.get("quant_method"), quantisation.get("quant_algo") or quantisation.get("format")]
    words += [f"{number} bits" for number in bits if isinstance(number, int)][:1]
    words += ["4 bits"] if quantisation.get("load_in_4bit") else []
    return ", ".join(word for word in words if isinstance(word, str)) or "quantization_config"


def _explain_kind(kind: object, where: str) -> ModelError:
    """Makes the error of a kind of config that is neither read nor traced. where: place of the kind."""
    from meshcast.simulator.models.trace.source import INSTALL

    rule = "needed and missing" if kind is None else "meshcast does not support this architecture"
    remedy = nearest(str(kind), SUPPORTED) + ". Other models: give the fields of `model:` themselves"
    if isinstance(kind, str):
        remedy += f"; types of transformers are read by a trace of their code ({INSTALL})"
        if kind in ENCODER_DECODERS:
            rule = "of encoders whose output a decoder reads, those of T5, BART, Whisper and their like are supported"
            remedy = "Give the fields of `model:` themselves, with `cross_attention: true`"
        if kind in UNDESCRIBED:
            rule = f"{UNDESCRIBED[kind]} are not described by meshcast"
            remedy = f"Use another model, or a rough forecast by a trace of its code ({INSTALL})"
    return ModelError(where, rule, remedy, kind)


def _trace(config: Mapping[str, Any], where: str, text: str) -> dict[str, object] | None:
    """Returns the fields of a model without a reader by a trace of its code; None if that is not possible here."""
    if config.get("is_encoder_decoder"):
        return None
    from meshcast.simulator.models.trace.source import trace_config  # takes time, and most types have a reader

    with explain_errors(where, text):
        return trace_config(config, "model_type")
