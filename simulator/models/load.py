"""Loads the shape of a model: a preset, a Hugging Face config, a YAML model file, or fields in the job.

Fields next to ``preset:`` change a preset or a file::

    load_model("llama3-70b")
    load_model("meta-llama/Llama-3.1-70B-Instruct")
    load_model("EleutherAI/pythia-6.9b")
    load_model("examples/llama3-70b/config.json")
    load_model({"preset": "llama3-70b", "layers": 16})
    load_model({"preset": "mixtral-8x7b", "moe": {"capacity": 1.0}})
    load_model({"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "seq": 2048})

A new preset is a new file in ``presets/``: the fields of `Model`, and their public source as ``source:``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import ModelError, nearest
from meshcast.hardware.load import Document, read_yaml
from meshcast.hardware.plugins import find_files, remember_names, with_installed
from meshcast.hardware.shared import shared_instance
from meshcast.simulator.models.hub import HubModel, find_hub_model, hub_files, hub_models, read_hub_fields
from meshcast.simulator.models.model import Model, error_place, explain_errors
from meshcast.simulator.models.names import match_name, split_name

__all__ = ["ALIASES", "Model", "find_model", "load_model", "model_source", "presets"]

PRESETS = Path(__file__).parent / "presets"

ALIASES = {
    "gpt2": "gpt2-124m",
    "gpt3": "gpt3-175b",
    "megatron-175b": "gpt3-175b",
    "megatron-530b": "megatron-529.6b",
    "megatron-1t": "megatron-1008b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3.3-70b": "llama3-70b",
    "llama-30b": "llama-33b",
    "mt-nlg-530b": "megatron-529.6b",
    "bloom": "bloom-176b",
    "qwen2.5-0.5b": "qwen2-0.5b",
    "qwen2.5-1.5b": "qwen2-1.5b",
    "qwen2.5-7b": "qwen2-7b",
    "qwen2.5-72b": "qwen2-72b",
    "deepseek-r1": "deepseek-v3",
}
"""Other names of presets: releases with the shape of an earlier model, whose default sequence length they keep."""

NESTING = 8
"""Largest number of model files that build on each other; more are taken for a circle."""


@remember_names
def presets() -> tuple[str, ...]:
    """Returns the names of all presets (without aliases), those of plug-ins among them, by family and then by size."""
    return tuple(sorted((*_list_shipped(), *_find_added()), key=_family_and_size))


@cache
def _list_shipped() -> tuple[str, ...]:
    return tuple(file.name.removesuffix(".yaml") for file in PRESETS.glob("*.yaml"))


@remember_names
def _find_added() -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of their models."""
    return find_files("models", ".yaml", (*_list_shipped(), *ALIASES))


def is_preset(name: str) -> bool:
    """Returns whether a preset, or an alias of a preset, has this name."""
    return name in ALIASES or name in presets()


def find_model(name: str) -> str | None:
    """Returns the preset, or the id of the table of public models, that a name means: an id of the Hugging Face hub
    (``Qwen/Qwen2.5-7B-Instruct``), a size of torchtitan (``llama3 8B``) or the path of such a folder; None if none is
    meant for sure."""
    if is_preset(name):
        return ALIASES.get(name, name)
    return match_name(name, presets(), ALIASES)


def _suggest_names(name: str) -> str:
    """Returns the presets and ids that a name is closest to: of the same version, those of the same size first; else
    those of the same family."""
    plain, shown = _plain(name), "meshcast list models and meshcast list ids show all"
    family, version = _family_and_version(name)
    ids = [each for maker in hub_files() for each in hub_models(maker)]
    names = {_plain(each): each for each in (*ids, *ALIASES, *presets())}
    known = [each for each in names if not version or _family_and_version(each)[1] == version]
    known = [each for each in known if _family_and_version(each)[0] == family] or known
    sizes = re.findall(r"(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z])", plain)
    same = [each for each in known if sizes and sizes[-1] in each.split("-")]
    near = [*get_close_matches(plain, same, 2, 0.5), *get_close_matches(plain, known, 3, 0.6)]
    close = [names[each] for each in dict.fromkeys(near)][:3]
    if close:
        return f"Did you mean {close[0]!r}? Valid: {', '.join(close)}, ...; {shown}"
    relatives = [names[each] for each in names if family and _family_and_version(each)[0] == family]
    valid = f"Valid: {', '.join(relatives[-6:])}, ..." if relatives else nearest(name, presets())
    return f"{valid}; {shown}"


def _plain(name: str) -> str:
    """Returns a name in one spelling: "llama3.1-8b"."""
    return "-".join(split_name(name))


def _family_and_version(name: str) -> tuple[str, str]:
    """Returns the two halves of the first part of a name: "llama" and "3.1" of llama3.1-8b."""
    first = "".join(split_name(name)[:1])
    family = first.rstrip("0123456789.")
    return family, first.removeprefix(family)


def model_source(name: str) -> str:
    """Returns the public source of the shape of a preset, or of an id of the table."""
    model = find_hub_model(name)
    if model is not None:
        return model.source
    if not is_preset(name):
        raise ModelError("model", "no preset has this name", nearest(name, presets()), name)
    return str(_find_added().get(name) or _preset(ALIASES.get(name, name))["source"])


class ModelSizes(NamedTuple):
    """What tells models apart, whatever they are called; 0: it has no experts.

    Attributes:
        layers: their number.
        hidden: width of a token.
        heads: of queries.
        experts: of a layer.
        top_k: experts of a token.
    """

    layers: int
    hidden: int
    heads: int
    experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, model: Model) -> ModelSizes:
        experts = (model.moe.experts, model.moe.top_k) if model.moe else ()
        return cls(model.layers, model.hidden, model.heads, *experts)


def find_preset_of_sizes(sizes: ModelSizes, beginnings: tuple[str, ...]) -> str | None:
    """Returns the preset of these sizes, of those whose names have such beginnings; None if there is none."""
    candidates = (name for name in presets() if name.startswith(beginnings))
    return next((name for name in candidates if ModelSizes.of(load_model(name)) == sizes), None)


def find_id_of_shape(model: Model) -> str | None:
    """Returns the first id of the table of public models that has the shape of a model; None if there is none."""
    for maker in hub_files():
        for name, known in hub_models(maker).items():
            if isinstance(known, HubModel) and {model.layers, model.hidden} <= known.sizes:
                named = load_model(name).model_copy(update={"name": model.name})
                if model.positions != "learned":
                    named = named.model_copy(update={"seq": model.seq})
                if named == model.model_copy(update={"left_out": named.left_out}):
                    return name
    return None


@with_installed
def load_model(spec: Any, where: str = "model", base: Path | str = ".") -> Model:
    """Returns the model that `spec` describes; equal fields give the same object.

    Args:
        spec: a preset's name, a path (``config.json``, a folder that holds it, a YAML model file), a mapping of
            fields, optionally on top of ``preset:`` (a name or a path); a `Model` is returned as it is.
        where: the place of `spec`, for error messages (``job.yaml:3 model``).
        base: the folder that relative paths start from, that of the job file.

    Raises:
        ModelError: the first mistake in it.
    """
    if isinstance(spec, Model):
        return spec
    if isinstance(spec, str) and is_preset(spec) and spec not in _find_added():
        return _load_preset(spec)
    fields = _fields(spec, where, Path(base), 0)
    fields.pop("source", None)
    with explain_errors(where):
        return shared_instance(Model, fields, lambda: Model.model_validate(fields))


def _load_preset(name: str) -> Model:
    """Returns the model of a preset, which ships and does not change."""
    fields = {key: value for key, value in _preset(ALIASES.get(name, name)).items() if key != "source"}
    return shared_instance(Model, fields, lambda: Model.model_validate(fields))


CHANGED_BY_FIELD = (
    *("mla", "moe", "linear_attention", "compressed", "blocks", "hyper_connections", "diffusion", "modulation"),
)
"""Parts of a model of which single fields can be changed on top of a preset."""


def _fields(spec: Any, where: str, base: Path, depth: int, text: str = "", sequence: object = None) -> dict[str, Any]:
    """Returns the fields that `spec` sets, without defaults, because changes on top may move defaults.

    where: place of `spec`, for error messages.
    base: folder of relative paths.
    depth: number of files that led here.
    text: text of the last of these files, if `spec` is its content.
    sequence: length of sequences, where fields on top of `spec` say it; configs of diffusers may not.
    """
    if isinstance(spec, str):
        if (known := find_model(spec)) and (is_preset(spec) or not os.path.exists(base / spec)):
            return dict(_preset(known, depth) if is_preset(known) else read_hub_fields(known))
        return _from_file(_find(spec, where, base), where, depth, Path(spec) != Path("config.json"), sequence)
    if not isinstance(spec, Mapping):
        remedy = "Give a preset's name, the path of a config.json or model file, or a mapping of fields"
        raise ModelError(where, "this does not describe a model", remedy, spec)
    if not spec.keys() & {"preset", "module"}:
        return dict(spec)
    below, where = _starting_fields(spec, where, base, depth, text)
    said = {"module", "seq"} if "module" in spec else {"preset"}  # a trace reads the length of sequences, too
    changes = {key: value for key, value in spec.items() if key not in said}
    if changes:  # reports must not show a changed model under the original name
        below["name"] = f"{below.get('name', 'custom')} with {', '.join(f'{key} {changes[key]}' for key in changes)}"
    for key in CHANGED_BY_FIELD:
        if isinstance(below.get(key), Mapping) and isinstance(changes.get(key), Mapping):
            changes[key] = {**below[key], **changes[key]}
    if isinstance(changes.get("branches"), Mapping) and below.get("branches"):
        changes["branches"] = _change_branches(below["branches"], changes["branches"], where)
    return below | changes


def _starting_fields(
    spec: Mapping[Any, Any], where: str, base: Path, depth: int, text: str
) -> tuple[dict[str, Any], str]:
    """Returns the fields that `spec` changes, those of a preset or of a trace of code, and the place where it says so;
    see `_fields`."""
    if "module" in spec:
        from meshcast.simulator.models.trace.source import trace_module  # few jobs need it

        return trace_module(spec, where), where
    preset, where = spec["preset"], error_place(where, "preset", text)
    if not isinstance(preset, str):
        raise ModelError(where, "must be a name or a path", nearest("", presets()), preset)
    return _fields(preset, where, base, depth, sequence=spec.get("seq")), where


def _change_branches(branches: Any, changes: Mapping[Any, Any], where: str) -> list[Any]:
    """Returns the branches of a model with changed fields. changes: fields of branches, by the name of a branch.

    Raises ModelError if no branch has a name in `changes`.
    """
    names = [branch.get("name") for branch in branches]
    for name, fields in changes.items():
        if name not in names or not isinstance(fields, Mapping):
            rule = "fields of a branch are changed under its name"
            raise ModelError(where, rule, f"Branches are {', '.join(map(str, names))}", f"{name}")
    return [{**branch, **changes.get(branch.get("name"), {})} for branch in branches]


def _preset(name: str, depth: int = 0) -> Fields:
    """Returns the fields of a preset. depth: number of files that led here."""
    added = _find_added().get(name)
    return _read_shipped(name) if added is None else _from_file(added, str(added), depth)


@cache
def _read_shipped(name: str) -> Fields:
    fields: Fields = read_shipped(PRESETS / f"{name}.yaml", error=ModelError).data
    return fields


def _find(spec: str, where: str, base: Path) -> Path:
    try:
        path = base / Path(spec).expanduser()
        if spec and (path / "config.json").is_file():
            return path / "config.json"
        if path.is_file():
            return path
        folder = path.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long for a file system, a zero byte, an unknown ~user
        folder = False
    if not ("/" in spec or spec.endswith((".json", ".yaml", ".yml"))):
        raise ModelError(where, "no preset or file has this name", _suggest_names(spec), spec)
    rule = "this folder holds no config.json" if folder else f"no such file, looked for from {base.resolve()}"
    remedy = "Give the path of a config.json or of a YAML model file"
    if not (folder or spec.endswith((".json", ".yaml", ".yml"))) and spec.count("/") == 1:  # as on Hugging Face
        remedy = f"{_suggest_names(spec)}; or give the path of a config.json"
    raise ModelError(where, rule, remedy, spec)


def _from_file(
    path: Path, where: str, depth: int, names_folder: bool = True, sequence: object = None
) -> dict[str, Any]:
    """Returns the fields of a file. names_folder: whether whoever names it names its folder, too; sequence: as in
    `_fields`."""
    if depth >= NESTING:
        raise ModelError(where, f"more than {NESTING} model files build on each other", "Break the circle", str(path))
    if path.suffix == ".json":
        data, text, _ = _read_json(path)
        name = _name_config(path, data, names_folder)
        from meshcast.simulator.models.huggingface import (
            from_config,  # its tables of keys take time, and few jobs need them
        )

        if sequence is not None and isinstance(data, Mapping) and "_class_name" in data:
            data = {"sequence": sequence, **data}
        return from_config(data, str(path), name, text).model_dump(exclude_unset=True)
    data, text, _ = read_yaml(path, error=ModelError)
    if not isinstance(data, Mapping):
        raise ModelError(str(path), "a model file holds a mapping", "Write `field: value` lines", data)
    fields = {"name": path.stem} | _fields(data, str(path), path.parent, depth + 1, text)
    fields.pop("source", None)
    with explain_errors(str(path), text):  # checked here, where file and line of a mistake are known
        Model.model_validate(fields)
    return fields


def _name_config(path: Path, config: Any, names_folder: bool) -> str | None:
    """Returns the name of the model of a config: its file's; of a config.json its folder's, if that was named or says
    what it holds. None: what the config itself says."""
    if path.name != "config.json":
        return path.stem
    folder = path.resolve().parent.name
    kind = re.sub("[^a-z]", "", str(config.get("model_type")).lower()) if isinstance(config, Mapping) else ""
    plain = folder.lower()
    tells = re.search(r"\d[bm](?![a-z])", plain) or (kind and kind in re.sub("[^a-z]", "", plain))
    return folder if names_folder or tells else None


def _read_json(path: Path) -> Document:
    """Returns the content of a JSON file; a duplicate key is an error, though JSON lets the last win."""
    try:
        text = read_text(path, DESCRIPTION)
        return Document(parse_json(text, constants=True), text, str(path))
    except Unreadable as error:
        raise error.error(ModelError, str(path), "Give a Hugging Face config.json") from None


def _family_and_size(name: str) -> tuple[str, float]:
    # mpt-125m, llama3-8b, mixtral-8x7b, qwen3-30b-a3b (a3b: 3 B are active)
    parts = re.fullmatch(r"(.+?)-(?:(\d+)x)?(\d+(?:\.\d+)?)([mb])(?:-a\d+b)?", name)
    if not parts:
        return name, 0.0
    return parts[1], int(parts[2] or 1) * float(parts[3]) * {"m": 1e-3, "b": 1.0}[parts[4]]
