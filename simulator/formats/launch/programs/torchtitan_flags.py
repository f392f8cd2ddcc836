"""torchtitan's command line: settings by the words that state them, and the words that change a setting.

Whatever a configuration in Python sets, also in functions that it calls, flags override it: the parser gets what the
function returns as its defaults, but for the model (pytorch/torchtitan @b5bcd76c6, torchtitan/config/manager.py,
parse_args; Trainer.Config.model_spec is suppressed). The rules are those of tyro: the last flag of a name counts, a
switch is turned off by ``no_`` before its name, lists are joined by commas, and the word that chooses a policy stands
behind all flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshcast.simulator.formats.launch.bash.records import Word
from meshcast.simulator.formats.launch.bash.script import ARGUMENTS
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange, file_of_place, line_of_place
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.launches import read_words
from meshcast.simulator.formats.launch.programs.torchtitan_configs import STOCK
from meshcast.simulator.formats.launch.programs.torchtitan_plan import RENAMED
from meshcast.simulator.formats.launch.table import SomeKeys, Stated

OFF = re.compile(r"(?P<section>(?:\w+\.)+)no_(?P<name>\w+)")
"""Arguments that turn a switch off (``--compile.no_enable``)."""

POLICY = re.compile(r"activation[-_]checkpoint:([\w-]+)")
"""The word of a command line that chooses how activations are checkpointed, since 2026-06."""

POLICY_SETTING = "activation_checkpoint"
"""The setting of a configuration that such a word changes."""

PASSED = re.compile(r"\$\{?@")
"""What a script passes its arguments by, which stand at the end of a command."""

CONFIG_FILE = ("job.config_file", "config_file")

SECTIONS = ("training", "parallelism", "compile", POLICY_SETTING)
"""Sections of which a flag sets every value of a plan."""

DEFAULTS: SomeKeys = {
    **{f"parallelism.{kind}_parallel_degree": 1 for kind in ("tensor", "pipeline", "context", "expert")},
    **{"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": -1},
    **{"parallelism.enable_sequence_parallel": True, "parallelism.enable_async_tensor_parallel": False},
    **{"parallelism.fsdp_reshard_after_forward": "default", "parallelism.num_pp_microbatches": 1},
    **{"parallelism.pipeline_parallel_schedule": "1F1B", "parallelism.pipeline_parallel_schedule_csv": ""},
    **{f"parallelism.pipeline_parallel_{end}_stage_less_layers": 1 for end in ("first", "last")},
    **{"parallelism.pipeline_parallel_layers_per_stage": None, "parallelism.module_fqns_per_model_part": None},
    **{"training.num_tokens_per_train_step": -1, "training.global_batch_size": -1},
    **{"training.enable_cpu_offload": False, "training.disable_cuda_graphs": False, "training.dtype": "float32"},
    **{"training.mixed_precision_param": "bfloat16", "compile.enable": False},
    **{"compile.enable_async_tensor_parallel": False, "compile.components": ["model", "loss"]},
    "activation_checkpoint.selective_ac_option": "2",
}
"""Values of settings that nothing states (torchtitan/config/configs.py; the last ones @9810191bb)."""


# ------------------------------------------------------------------------------------------------ reading


def name_settings(arguments: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns arguments by the names of today's settings."""
    settings = {}
    for name, stated in arguments.items():
        plain = name.replace("-", "_")
        if (off := OFF.fullmatch(plain)) is not None and stated.value is True:
            plain, stated = f"{off['section']}{off['name']}", Stated(False, stated.shown, stated.place)
        plain = "job.config_file" if plain in CONFIG_FILE else plain
        settings[RENAMED.get(plain, plain)] = stated
    return settings


def read_flags(arguments: Mapping[str, Stated], positional: Sequence[Stated]) -> dict[str, Stated]:
    """Returns the settings of a command by the names of today's. positional: words behind no flag."""
    flags, policy = dict(arguments), {}
    for name, stated in [("", stated) for stated in positional] + [*arguments.items()]:
        *before, last = stated.value if isinstance(stated.value, list) else [stated.value]
        if (word := POLICY.fullmatch(str(last))) is not None:
            policy[f"{POLICY_SETTING}.mode"] = Stated(word[1].replace("-", "_"), str(last), stated.place)
            if name:  # behind a switch, or a value
                flags[name] = replace(stated, value=before[0] if len(before) == 1 else before or True)
    return policy | name_settings(flags)


def read_options(file: LaunchFile) -> dict[str, Stated]:
    """Returns the settings of the arguments beside a file."""
    words = file.options.arguments
    flags = read_words([Word(text, 0) for text in words if not POLICY.fullmatch(text)], ARGUMENTS)
    return read_flags(flags, [Stated(text, text, ARGUMENTS) for text in words if POLICY.fullmatch(text)])


# ------------------------------------------------------------------------------------------------ changes


def override_setting(change: SettingChange, file: LaunchFile, stated: Mapping[str, Stated]) -> SettingChange:
    """Returns the change of a file, or of a command line, that makes a change of a setting.

    A setting of a TOML file is changed there, a setting of a command line in it, and a setting of a configuration in
    Python by a flag. stated: the settings of the program that the file states.
    """
    place, flag = file_of_place(change.place), _spell_flag(change)
    of_python = place.endswith((".py", STOCK)) or (not place and file.suffix == ".py")
    of_file = place.endswith(".toml") or (not place and file.data is not None)
    if flag is None or of_file:
        return change
    if of_python or not place:
        return _add_flag(flag, change, file, stated)
    if not (POLICY.fullmatch(change.name) or isinstance(change.before, bool) or flag[1] is True):
        return replace(change, after=None if change.after is None else flag[1])
    return replace(change, before=True, flag=None if change.after is None else flag)


def _spell_flag(change: SettingChange) -> tuple[str, object] | None:
    """Returns a flag and its value, or a word and True, that make a change; None if no words do."""
    name, value = change.name.lstrip("-").replace("-", "_"), change.after
    if name == POLICY_SETTING or POLICY.fullmatch(name):
        return f"activation-checkpoint:{'selective' if value is None else value}", True
    section, _, setting = name.rpartition(".")
    if section not in SECTIONS:
        return None
    if (off := OFF.fullmatch(name)) is not None:
        section, setting = off["section"].rstrip("."), off["name"]
    if value is None:
        name = f"{section}.{setting}"
        if name not in DEFAULTS:
            return None
        value = DEFAULTS[name]
    if isinstance(value, list | tuple):
        parts = [",".join(part) if isinstance(part, list | tuple) else part for part in value]
        value = parts if parts != list(value) else ",".join(parts)
    if value is False:
        return f"--{section}.no_{setting}", True
    return f"--{section}.{setting}", value


def _add_flag(
    flag: tuple[str, object], change: SettingChange, file: LaunchFile, stated: Mapping[str, Stated]
) -> SettingChange:
    """Returns the change that adds a flag, or the word that stands behind all flags."""
    name, value = flag
    is_word, of_python = not name.startswith("-"), file.suffix == ".py"
    if of_python or (is_word and PASSED.search(file.text)):
        return SettingChange(name, ARGUMENTS, None, value)
    beside = [setting for setting in change.neighbours or stated.values() if not POLICY.fullmatch(setting.shown)]
    if is_word:
        here = [setting for setting in beside if file_of_place(setting.place) == file.where]
        beside = sorted(here, key=lambda other: (line_of_place(other.place), file.text.rfind(other.shown)))[::-1]
    return SettingChange(change.name, "", None, change.after, tuple(beside), flag=flag)
