"""Heads in place of the output layer of a language model, by the class that ``architectures`` of a config names."""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.hardware.errors import ModelError

ENCODERS = frozenset({"BERT", "MegatronBERT", "PreNormRoBERTa", "BERTGeneration", "DistilBERT", "MPNet", "ModernBERT"})
"""Readers of encoders, whose heads read the state of the first token behind a square layer (`pooler`)."""

ENDS_OF_ANSWERS = 2
"""Logits of a token: that an answer begins there, and that it ends."""

DEFAULT_CLASSES = 2
"""``num_labels`` of a config that states no labels."""


def read_head(config: Mapping[str, object], reader: str, fields: dict[str, object]) -> dict[str, object]:
    """Returns the fields of `Model` for a head of classes, a reward or vectors; none of other classes.

    reader: name of the class that reads the config.
    fields: what it has read.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    both = bool(fields.get("cross_attention"))
    if name.endswith("ForSequenceClassification"):
        if reader in ENCODERS or both:
            return _replace_head({"classes": _count_classes(config), "pool": "token"}, "dense", "bias")
        return _replace_head({"classes": _count_classes(config)})
    if name.endswith("ForImageClassification"):
        return _replace_head({"classes": _count_classes(config), "pool": "mean"}, "bias")
    if name.endswith("ForTokenClassification"):
        if both:
            rule = "it has the encoder alone, which is not described"
            raise ModelError("architectures", rule, "Give the fields of `model:` themselves", name)
        square = ("dense",) if reader == "ModernBERT" else ()
        return _replace_head({"classes": _count_classes(config), "pool": "none"}, *square, "bias")
    if name.endswith("ForQuestionAnswering"):
        return _replace_head({"classes": ENDS_OF_ANSWERS, "pool": "none"}, "bias")
    if reader in ENCODERS and name.endswith("Model"):
        return _replace_head({"pool": "mean"})
    return {}


def _replace_head(output: dict[str, object], *head: str) -> dict[str, object]:
    return {"output": output, "head": head, "mtp": 0}


def _count_classes(config: Mapping[str, object]) -> int:
    labels = config.get("id2label")
    stated = config.get("num_labels")
    if isinstance(stated, int):
        return stated
    return len(labels) if isinstance(labels, Mapping | list) and labels else DEFAULT_CLASSES
