"""The table of public models: ids of the Hugging Face hub and the keys of their ``config.json``.

``hub/<maker>.yaml`` holds the models of a maker, the ``org`` of ``org/name``::

    maker: EleutherAI
    same:                       # ids of the shape of a preset or of another id
      llama2-7b: [llemma_7b]
      EleutherAI/pythia-70m: [pythia-70m-deduped]
    families:
    - source: Biderman et al. 2023, table 1
      config: {model_type: gpt_neox, rotary_pct: 0.25}        # keys of all models of a family
      keys: [num_hidden_layers, hidden_size]                  # keys of a row; text_config.hidden_size is a nested one
      models:
        pythia-70m: [6, 512]
        pythia-6.9b: [32, 4096, {vocab_size: 50432}]          # further keys of this model

A config is read as a ``config.json`` is. Its ``max_position_embeddings`` is the length of most sequences in training,
as in presets, where it is known, for a job that states none trains on sequences of that length.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from meshcast.hardware.documents.shipped import keep_data, read_shipped

HUB = Path(__file__).parent / "hub"

READERS = Path(__file__).parent / "huggingface"


class HubModel(NamedTuple):
    """A model of the table.

    Attributes:
        config: the keys of its ``config.json`` that matter for cost.
        source: where they are from.
    """

    config: dict[str, Any]
    source: str

    @property
    def sizes(self) -> set[int]:
        """Numbers in the config and in its parts."""
        parts = [self.config, *(part for part in self.config.values() if isinstance(part, dict))]
        return {value for part in parts for value in part.values() if isinstance(value, int)}


@cache
def hub_files() -> dict[str, Path]:
    """Returns the files of all makers, by their names in small letters."""
    return {file.stem: file for file in sorted(HUB.glob("*.yaml"))}


@cache
def hub_models(maker: str) -> dict[str, str | HubModel]:
    """Returns the models of a maker by their ids: a shape, or the preset or id that has the same."""
    table = read_shipped(hub_files()[maker]).data
    org = table["maker"]
    models: dict[str, str | HubModel] = {
        f"{org}/{name}": target for target, names in table.get("same", {}).items() for name in names
    }
    for family in table.get("families", ()):
        for name, row in family["models"].items():
            models[f"{org}/{name}"] = HubModel(_join_keys(family, row), family["source"])
    return models


def _join_keys(family: dict[str, Any], row: list[Any]) -> dict[str, Any]:
    """Returns the config of a row: the keys of its family, of its columns, and its own."""
    columns = family["keys"]
    own = row[len(columns)] if len(row) > len(columns) else {}
    config: dict[str, Any] = {}
    for word, value in (family["config"] | dict(zip(columns, row, strict=False)) | own).items():
        *path, last = word.split(".")
        part = config
        for each in path:
            part = part.setdefault(each, {})
        part[last] = deepcopy(value)  # a nested key of a row changes it
    return config


def find_hub_model(name: str) -> HubModel | None:
    """Returns the model of an id of the table that has a shape of its own; None for all other names."""
    maker = name.partition("/")[0].lower()
    model = hub_models(maker).get(name) if maker in hub_files() else None
    return model if isinstance(model, HubModel) else None


@cache
def read_hub_fields(name: str) -> dict[str, Any]:
    """Returns the fields of `Model` of an id of the table that has a shape of its own.

    They are kept for the same file and the same readers, whose import takes longer than a preset.
    """
    file = hub_files()[name.partition("/")[0].lower()]
    short = name.rpartition("/")[2]
    kept = Path(cache_from_source(str(file))).with_suffix(f".{short}.fields")
    return keep_data(kept, (_identify_readers(), file.read_text("utf-8")), lambda: _read_fields(name, short))


def _read_fields(name: str, short: str) -> dict[str, Any]:
    from meshcast.simulator.models.huggingface import from_config  # takes time, and is needed once

    model = find_hub_model(name)
    assert model is not None
    return from_config(model.config, f"models/hub: {name}", short).model_dump(exclude_unset=True)


@cache
def _identify_readers() -> int:
    """Returns a number that changes with the source of the readers of configs."""
    number = 0
    for file in sorted(READERS.glob("*.py")):
        number = crc32(file.read_bytes(), number)
    return number
