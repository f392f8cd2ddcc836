"""Names of models elsewhere: ids of the Hugging Face hub, sizes of torchtitan, plain words.

A name means a preset or an id of the table (`hub`) if it is one, but for separators, for its maker and for words at its
end that leave the shape as it is. All other names mean none: a word that is not known (VL, Embedding, Reward, 1048k)
may stand for another shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from zlib import crc32

from meshcast.hardware.documents.shipped import keep_data
from meshcast.simulator.models.hub import HUB, hub_files, hub_models

SAME_SHAPE = frozenset(
    """instruct instruction chat base it pt hf sft dpo rlhf thinking 2507 v0.1 gptq awq bnb gguf int4 int8 4bit 8bit fp8
    nvfp4 bf16 fp16 fp32""".split()  # noqa: SIM905
)
"""Words at the end of a name that leave the shape as it is: training stages, number formats, the first version."""

LONGEST = 200
"""Longest name that is looked up."""


def split_name(name: str) -> tuple[str, ...]:
    """Returns the parts of a name that tell models apart: ``meta-llama/Llama-2-7b`` and ``llama2 7B`` are
    ("llama2", "7b"). A family and its version are a single part."""
    plain = name.strip().rstrip("/").rpartition("/")[2].lower()[: LONGEST + 1]
    parts = [part for part in re.split(r"[\s_:-]+", plain) if part]
    parts = parts[1:] if parts[:1] == ["meta"] else parts
    if len(parts) > 1 and parts[0].isalpha() and re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", parts[1]):
        parts[:2] = [parts[0] + parts[1]]
    return tuple(parts)


def _drop_stage(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the parts of an id without words that leave the shape, if a size is left: gemma-3-4b-pt is gemma3 4b, and
    t5-base is no t5."""
    while parts[-1] in SAME_SHAPE and any(re.search(r"\d[bm]$", part) for part in parts[:-1]):
        parts = parts[:-1]
    return parts


def match_name(name: str, presets: Iterable[str], aliases: dict[str, str]) -> str | None:
    """Returns the preset, or the id of the table, that a name means; None if it means none for sure.

    aliases: other names of presets, with these.
    """
    if len(name) > LONGEST * 10:
        return None
    parts, maker = split_name(name), name.strip().partition("/")[0].lower()
    # Of the files of all makers, which take time to read, most names need that of theirs or none.
    tables = (
        lambda: _ids_of(maker) if maker in hub_files() else {},
        lambda: _presets_by_parts(tuple(presets), tuple(aliases.items())),
        _all_ids,
    )
    return next((meant for table in tables if (meant := _match_parts(parts, table()))), None)


def _match_parts(parts: tuple[str, ...], known: dict[tuple[str, ...], str]) -> str | None:
    """Returns what a name of these parts means, as it is or without words at its end that leave the shape."""
    while parts:
        if parts in known:
            return known[parts]
        if parts[-1] not in SAME_SHAPE:
            return None
        parts = parts[:-1]
    return None


@cache
def _ids_of(maker: str) -> dict[tuple[str, ...], str]:
    """Returns what the ids of a maker mean, by their parts."""
    models = hub_models(maker).items()
    return {_drop_stage(split_name(name)): model if isinstance(model, str) else name for name, model in models}


@cache
def _presets_by_parts(presets: tuple[str, ...], aliases: tuple[tuple[str, str], ...]) -> dict[tuple[str, ...], str]:
    """Returns the presets by the parts of their names."""
    return {split_name(name): preset for name, preset in [*aliases, *((name, name) for name in presets)]}


@cache
def _all_ids() -> dict[tuple[str, ...], str]:
    """Returns what the ids of all makers mean, by their parts; kept as long as their files are the same."""
    stamps = tuple((maker, file.stat().st_mtime_ns, file.stat().st_size) for maker, file in hub_files().items())
    kept = Path(cache_from_source(str(HUB / "ids.py"))).with_suffix(".parsed")
    ids: dict[tuple[str, ...], str] = keep_data(kept, (stamps, crc32(Path(__file__).read_bytes())), _read_all_ids)
    return ids


def _read_all_ids() -> dict[tuple[str, ...], str]:
    return {parts: meant for maker in hub_files() for parts, meant in _ids_of(maker).items()}
