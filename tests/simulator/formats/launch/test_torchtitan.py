"""torchtitan's files in their three forms, its own configurations, and runs that people reported."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.formats.launch.changed_settings import EditedFiles, apply_setting_changes, list_changed_settings
from meshcast.simulator.formats.launch.convert import import_file, import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import (
    LaunchOptions,
    parse_launch_text,
    read_launch_file,
    reading_launch_files,
)
from meshcast.simulator.formats.launch.program import Evidence
from meshcast.simulator.formats.launch.programs.torchtitan import TORCHTITAN
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS, STOCK_CONFIGS
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model
from tests.draws import drawn

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 100
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
components = ["model"]
"""

REGISTRY = '''
import os

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

SEQUENCES, TP = 2, 2


def _base(flavor: str, *, steps: int = 10) -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry(flavor),
        training=TrainingConfig(local_batch_size=SEQUENCES, seq_len=2 * 4096, steps=steps),
        parallelism=ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule="Interleaved1F1B"),
        activation_checkpoint=SelectiveAC.Config(),
    )


def a_run() -> Trainer.Config:
    """Two replicas of shards."""
    config = _base("8B", steps=100)
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.tensor_parallel_degree = TP
    config.activation_checkpoint = FullAC.Config()
    config.compile = CompileConfig(enable=bool, components=["model"])
    config.compile.enable = not_known if os.path.exists("x") else True
    config.compile.enable = True
    return config
'''


def read(text: str, suffix: str, *words: str, folder: Path = Path(), **given: Any) -> ImportedJob:
    """Imports a text. words: the arguments of its command line."""
    options = LaunchOptions(arguments=words)
    file = parse_launch_text(text, f"file{suffix}", suffix, folder, options)
    return import_file(file, form="torchtitan", **given)


def plan_of(imported: ImportedJob) -> dict[str, Any]:
    """The keys of a job but those that follow from the release."""
    keys = flatten_job(load_job(imported.job))
    return {key: value for key, value in keys.items() if key != "framework.release" and "early_stop" not in key}


def test_the_three_forms_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(TOML.replace("tensor_parallel_degree = 2", "tensor_parallel_degree = 4"))
    command = "torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file ./run.toml"
    (tmp_path / "train.sh").write_text(f"{command} --parallelism.tensor_parallel_degree 2\n")
    toml = read(TOML, ".toml", cluster="dgx-h100:2")
    started = import_file(read_launch_file(tmp_path / "train.sh"), form="torchtitan", cluster="dgx-h100:2")
    python = read(REGISTRY, ".py", cluster="dgx-h100:2")
    assert plan_of(toml) == plan_of(started) == plan_of(python)
    keys = plan_of(python)
    assert (keys["plan.tp"], keys["plan.pp"], keys["plan.replicate"], keys["plan.data"]) == (2, 2, 2, "fsdp")
    assert (keys["plan.recompute"], keys["plan.pipeline.chunks"]) == ("full", 2)
    assert (keys["batch.micro"], keys["batch.global"], keys["run.steps"]) == (1, 8, 100)


def test_the_script_of_its_readme_reads_variables_and_subcommands() -> None:
    command = "MODULE=llama3 CONFIG=llama3_8b NGPU=16 ./run_train.sh --compile.no-enable activation-checkpoint:full\n"
    file = parse_launch_text(command, "run.sh", ".sh")
    assert TORCHTITAN.recognise(file) is Evidence.CERTAIN
    job = import_file(file).job
    assert (job["model"], job["cluster"], job["plan"]["recompute"]) == ("llama3-8b", "dgx-h100:2", "full")
    assert not load_job(job).framework.compile


def test_converters_of_spring_2026_are_scaled_by_tensor() -> None:
    """`recipe_name` of Float8LinearConverter is None until 2026-04-27, which is torchao's tensorwise recipe."""
    converter = "[Float8LinearConverter.Config(filter_fqns=['output'])]"
    old = REGISTRY.replace(
        "        model_spec", f"        model_converters=Container.Config(converters={converter}),\n        model_spec"
    )
    new = REGISTRY.replace("model_registry(flavor)", f"model_registry(flavor, converters={converter})")
    formats = [read(text, ".py").job["precision"]["compute"] for text in (old, new)]
    assert formats == ["fp8-tensorwise", "fp8-rowwise"]


def test_a_file_of_several_configurations_asks_which() -> None:
    two = REGISTRY + "\n\ndef another_run() -> Trainer.Config:\n    return _base('70B')\n"
    with pytest.raises(OpenQuestions) as asked:
        read(two, ".py")
    assert "a_run, another_run" in str(asked.value)
    chosen = read(two, ".py", "--config", "another_run", "--parallelism.tensor_parallel_degree=8")
    assert (chosen.job["model"], chosen.job["plan"]["tp"]) == ("llama3-70b", 8)


def test_values_that_do_not_follow_from_the_text_are_asked_for() -> None:
    unknown = REGISTRY.replace("SEQUENCES, TP = 2, 2", "SEQUENCES = 2\nTP = choose_degree()")
    with pytest.raises(OpenQuestions) as asked:
        read(unknown, ".py")
    assert "tensor_parallel_degree" in str(asked.value)


@pytest.mark.parametrize(
    "body",
    [
        "    return a_run()",
        "    x = 10\n    return Trainer.Config(training=TrainingConfig(steps=x * x * x * x * 9**9**9 * [0] * 10**9))",
        "    while True:\n        pass",
        "    import os; os.system('exit 1'); raise SystemExit",
        "    return " + "(" * 150 + "1" + ")" * 150,
    ],
)
def test_nothing_of_a_file_runs(body: str) -> None:
    text = f"from torchtitan.trainer import Trainer\ndef a_run() -> Trainer.Config:\n{body}\n"
    with pytest.raises(OpenQuestions):
        read(text, ".py")


# ---------------------------------------------------------------------------- torchtitan's own configurations


@pytest.mark.parametrize("name", drawn(list(STOCK_CONFIGS), keep=6))
def test_a_configuration_of_its_own_is_read_or_asks_for_its_model_or_optimizer(name: str) -> None:
    stock = STOCK_CONFIGS[name]
    command = f"torchrun --nproc_per_node=64 -m torchtitan.train --module {stock['model_spec.name']} --config {name}\n"
    try:
        found = read(command, ".sh", cluster="dgx-h100:8")
    except OpenQuestions as asked:
        assert (stock["model_spec.name"], stock["model_spec.flavor"].lower()) not in FLAVORS or "NVFP4" in str(stock)
        assert "preset" in str(asked) or "Muon" in str(asked) or "NVFP4" in str(asked)
        return
    keys = plan_of(found)
    assert keys["plan.tp"] == stock.get("parallelism.tensor_parallel_degree", 1)
    assert keys.get("plan.ep", 1) == stock.get("parallelism.expert_parallel_degree", 1)
    assert keys["batch.sequence"] == stock["training.max_context_length"]
    assert keys["batch.micro"] * keys["batch.sequence"] == stock["training.num_tokens_per_microbatch_per_dp_rank"]
    assert keys["plan.recompute"] == {"selective": "operators"}.get(*[stock["activation_checkpoint"]] * 2)
    assert keys["framework.set.loss.chunk_count"] == 8
    assert keys["framework.set.cuda_graphs"] == (not stock.get("training.disable_cuda_graphs", False))


@pytest.mark.parametrize(("name", "flavor"), drawn(list(FLAVORS), keep=2))
def test_every_flavor_is_a_model_of_its_size(name: str, flavor: str) -> None:
    model = load_model(FLAVORS[name, flavor])
    if (size := re.match(r"([\d.]+)b", flavor)) is not None:
        assert model.parameters / 1e9 == pytest.approx(float(size[1]), rel=0.25)


# ------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[optimizer]\nname = 'Muon'", "optimizer.name"),
        ("[fault_tolerance]\nenable = true", "torchft"),
        ("[parallelism]\nsome_parallel_degree = 2", "some_parallel_degree"),
        ("[activation_checkpoint]\nmode = 'memory_budget'", "plan.recompute"),
        ("[model]\nname = 'llama3'\nflavor = '9B'", "model=llama3-8b"),
    ],
)
def test_what_decides_and_is_not_understood_is_asked_for(line: str, words: str) -> None:
    head = "" if "[model]" in line else "[model]\nname = 'llama3'\nflavor = '8B'\n"
    with pytest.raises(OpenQuestions, match=words):
        read(head + line, ".toml")


@pytest.mark.parametrize(("option", "kind"), [("", ("full", 16)), ("selective_ac_option = 'op'", ("operators", None))])
def test_selective_checkpointing_is_of_every_second_layer_or_by_operator(option: str, kind: Any) -> None:
    """The default of releases that read TOML is every second layer (`selective_ac_option: str = "2"`)."""
    text = f"[model]\nname = 'llama3'\nflavor = '8B'\n[activation_checkpoint]\nmode = 'selective'\n{option}\n"
    plan = read(text, ".toml").job["plan"]
    assert (plan["recompute"], plan.get("recompute_layers")) == kind


def test_pipelines_of_2024_have_a_number_of_microbatches_and_ends_of_stages() -> None:
    """By default a micro-batch for every stage; `pipeline_parallel_split_points` names the layers that begin one."""
    text = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nbatch_size = 16\n[experimental]\n"
    text += "pipeline_parallel_degree = 2\npipeline_parallel_schedule = 'Interleaved1F1B'\n"
    keys = [
        flatten_job(load_job(read(text + line, ".toml").job))
        for line in (
            "pipeline_parallel_split_points = ['layers.6', 'layers.15', 'layers.24']",
            "pipeline_parallel_microbatches = 8",
        )
    ]
    assert [one["batch.micro"] for one in keys] == [4, 2]
    assert (keys[0]["plan.partition"], keys[0]["plan.pipeline.chunks"]) == ((6, 9, 9, 8), 2)


def test_weights_and_states_in_bf16_have_no_copy_in_fp32() -> None:
    text = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\ndtype = 'bfloat16'\n"
    precision = load_job(read(text, ".toml").job).framework
    assert (precision.main_weights, precision.moments) == ("bf16", "bf16")


# ------------------------------------------------------------------------------------------- reported runs

LLAMA2 = """
[model]
name = "llama2"
flavor = "7B"
[training]
batch_size = 8
seq_len = 2048
data_parallel_degree = -1
tensor_parallel_degree = 1
compile = false
[activation_checkpoint]
"""

DEEPSEEK = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = {batch}
seq_len = 4096
[parallelism]
expert_parallel_degree = 8
expert_tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
components = ["loss"]
"""


@pytest.mark.parametrize(
    ("mode", "active", "tokens"),
    [
        ('mode = "full"', 22.7, 6_200),
        ('mode = "selective"\nselective_ac_option = "op"', 49.5, 6_700),
    ],
)
def test_a_run_of_2024_on_eight_gpus(mode: str, active: float, tokens: float) -> None:
    """pytorch/torchtitan pull request 135, of March 2024: Llama 2 7B, eager, on 8 H100 of 95 GiB."""
    job = read(LLAMA2 + mode, ".toml", cluster="grand-teton-h100:1").job
    answer = simulate(load_job(job, ["framework.release=2024-03"])).to_dict()
    assert answer["memory"]["peak_allocated_gib"] == pytest.approx(active, rel=0.05)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(tokens, rel=0.05)


def test_a_run_of_experts_that_fits_with_half_the_batch() -> None:
    """pytorch/torchtitan issue 1789, of October 2025: 73.3 GiB and 11,250 to 11,760 tokens/s a GPU with a local
    batch of 4 on 8 H100 of 80 GB, out of memory with 8."""
    half, whole = (simulate(read(DEEPSEEK.format(batch=batch), ".toml").job) for batch in (4, 8))
    answer = half.to_dict()
    assert half.fits and not whole.fits
    assert answer["memory"]["peak_reserved_gib"] == pytest.approx(73.3, rel=0.08)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(11_500, rel=0.05)


def test_text_of_another_program_is_refused() -> None:
    with pytest.raises(Exception, match="no configuration of torchtitan in Python, and not valid TOML"):
        import_text("a: [1", "file", "torchtitan")


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        (REGISTRY, ".py", ()),
        (REGISTRY, ".py", ("activation-checkpoint:none",)),
        (REGISTRY.replace("FullAC.Config()", 'ActivationCheckpointConfig(mode="full")'), ".py", ("--config", "a_run")),
        ("torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b\n", ".sh", ()),
        (
            "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b "
            "--compile.enable --compile.no_enable_async_tensor_parallel activation-checkpoint:selective\n",
            ".sh",
            (),
        ),
        (TOML, ".toml", ()),
        ("torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b $@\n", ".sh", ()),
    ],
)
def test_a_configuration_is_overridden_by_flags_that_its_parser_takes(
    text: str, suffix: str, words: tuple[str, ...]
) -> None:
    """Whatever a function sets, flags change it; those that say a switch, a list of lists, and a policy are of tyro's
    kind, and the policy is the last word."""
    options = LaunchOptions(arguments=words)
    with reading_launch_files(options):
        _check_edits(text, suffix)


def _check_edits(text: str, suffix: str) -> None:
    """Checks that a file is edited to other jobs, as it is read with the arguments of now."""
    file = parse_launch_text(text, f"run{suffix}", suffix)
    found = import_file(file, form="torchtitan", cluster="dgx-h100:2")
    before = load_job(found.job)
    for plan, batch, traits in CHANGED:
        framework = found.job["framework"]
        stated = {**framework, "set": {**framework.get("set", {}), **traits}}
        changed = {**found.job, "plan": plan, "batch": {**found.job["batch"], **batch}, "framework": stated}
        after, edited, launch, back = load_job(changed), EditedFiles(file), found, before
        for _ in range(2):
            edited = apply_setting_changes(edited, list_changed_settings(launch, edited.file, back, after))
            again = parse_launch_text(edited.file.text, file.where, suffix, options=edited.file.options)
            edited = replace(edited, file=again)
            launch = import_file(again, form="torchtitan", cluster="dgx-h100:2")
            back = load_job(launch.job)
        assert flatten_job(back) == flatten_job(after)
        assert suffix != ".py" or edited.file.text == text
        if suffix != ".toml":
            given = [*edited.file.options.arguments]
            _check_words(given if suffix == ".py" else shlex.split(edited.file.text.replace("$@", shlex.join(given))))


IMPORTS = """
from torchtitan.trainer import Trainer
from ..shared.base import a_run, round_and_round


def my_run() -> Trainer.Config:
    config = a_run()
    config.parallelism.tensor_parallel_degree = 8
    return config


def cycle() -> Trainer.Config:
    return round_and_round()
"""


def test_a_configuration_of_a_file_that_is_imported_is_followed(tmp_path: Path) -> None:
    """One that is not there is asked for, also where the model is known: it may say anything else."""
    folder = tmp_path / "mine"
    folder.mkdir()
    with pytest.raises(OpenQuestions, match=r"a_run\(\): what it returns does not stand in a file here"):
        import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, MY_RUN), ["model=llama3-8b"])
    (tmp_path / "shared").mkdir()
    beside = "from mine.run import cycle\n\ndef round_and_round() -> Trainer.Config:\n    return cycle()\n"
    (tmp_path / "shared" / "base.py").write_text(REGISTRY + beside, "utf-8")
    (folder / "run.py").write_text(IMPORTS, "utf-8")
    found = import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, MY_RUN), cluster="dgx-h100:4")
    assert found.job == read(REGISTRY.replace("TP = 2, 2", "TP = 2, 8"), ".py", cluster="dgx-h100:4").job
    assert found.places["plan.replicate"].startswith(str(tmp_path / "mine" / ".." / "shared" / "base.py"))
    with pytest.raises(OpenQuestions, match="does not stand in a file here"):
        import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, CYCLE), ["model=llama3-8b"])


MY_RUN, CYCLE = (LaunchOptions(arguments=("--config", name)) for name in ("my_run", "cycle"))

CHANGED = (
    ({"tp": 4, "pp": 1, "fsdp": True, "recompute": "none"}, {"global": 8}, {}),
    (
        {"tp": 2, "pp": 2, "fsdp": True, "recompute": "operators", "partition": [17, 15]},
        {"global": 16},
        {"compile": False, "cuda_graphs": False},
    ),
    ({"tp": 8, "pp": 1, "fsdp": True, "recompute": "full"}, {"global": 4}, {"compile": True, "overlap": {"tp": True}}),
)
"""Plans, batches and traits to which files are edited."""


def _check_words(words: Sequence[str]) -> None:
    """Checks that the words are as tyro takes them."""
    policies = [number for number, word in enumerate(words) if word.startswith("activation-checkpoint:")]
    assert policies in ([], [len(words) - 1]), words
    assert not {"True", "False", "true", "false"} & {*words}
    assert not any(word.startswith("[") for word in words)
