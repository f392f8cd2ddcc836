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
from meshcast.simulator.formats.launch.convert import import_file
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, parse_launch_text, reading_launch_files
from meshcast.simulator.formats.launch.program import Evidence
from meshcast.simulator.formats.launch.programs.torchtitan import TORCHTITAN
from meshcast.simulator.formats.launch.programs.torchtitan_configs import FLAVORS, STOCK_CONFIGS
from meshcast.simulator.formats.launch.table import Keys
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model
from tests.draws import drawn
from tests.launch_files import REGISTRY, TITAN, keys_of, read_launch

START = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b"


def read(text: str, suffix: str, **given: Any) -> ImportedJob:
    return read_launch("any", command=text, name=f"file{suffix}", form="torchtitan", **given)


def plan_of(imported: ImportedJob) -> Keys:
    """Returns the keys of a job but those that follow from the release."""
    keys = keys_of(imported)
    return {key: value for key, value in keys.items() if key != "framework.release" and "early_stop" not in key}


ELABORATE = f"""{REGISTRY.partition("def a_run")[0]}
def a_run() -> Trainer.Config:
    copies, (tp, steps) = int("2"), [TP, 99]
    steps += 1
    config = deepcopy(_base("8B"))
    config.training = replace(config.training, steps=steps)
    config.parallelism.data_parallel_replicate_degree: int = copies
    config.parallelism.tensor_parallel_degree = int(os.environ.get("TP", "2") and tp or "4")
    torch.backends.flag = True
    if os.getenv("NONE") or "full":
        config.activation_checkpoint = FullAC.Config()
        config.compile.enable, config.compile.components = True, ["model"]
    if os.getenv("NONE") and config:
        return None
    elif copies:
        return config
"""


def test_toml_and_python_say_the_same() -> None:
    plans = [plan_of(read(text, ".py", cluster="dgx-h100:2")) for text in (REGISTRY, ELABORATE)]
    assert [plan_of(read(TITAN, ".toml", cluster="dgx-h100:2"))] * 2 == plans


def test_the_script_of_its_readme_is_recognised() -> None:
    file = parse_launch_text("MODULE=llama3 CONFIG=llama3_8b NGPU=16 ./run_train.sh\n", "run.sh", ".sh")
    assert TORCHTITAN.recognise(file) is Evidence.CERTAIN


# ---------------------------------------------------------------------------- torchtitan's own configurations


@pytest.mark.parametrize("name", drawn(list(STOCK_CONFIGS), keep=8))
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


def test_every_flavor_is_a_model_of_its_size() -> None:
    sizes = {key: float(size[1]) for key in FLAVORS if (size := re.match(r"([\d.]+)b$", key[1])) is not None}
    parameters = {key: load_model(FLAVORS[key]).parameters / 1e9 for key in sizes}
    assert parameters == pytest.approx(sizes, rel=0.25) and len(sizes) > 10


# ------------------------------------------------------------------------------------------- reported runs

LLAMA2 = "[model]\nname = 'llama2'\nflavor = '7B'\n[training]\nbatch_size = 8\nseq_len = 2048\n"
LLAMA2 += "data_parallel_degree = -1\ntensor_parallel_degree = 1\ncompile = false\n[activation_checkpoint]\n"
OPERATORS = "mode = 'selective'\nselective_ac_option = 'op'\n"
DEEPSEEK = "[model]\nname = 'deepseek_v3'\nflavor = '16B'\n[parallelism]\nexpert_parallel_degree = 8\n"
DEEPSEEK += f"expert_tensor_parallel_degree = 1\n[activation_checkpoint]\n{OPERATORS}[compile]\nenable = true\n"
DEEPSEEK += "components = ['loss']\n[training]\nseq_len = 4096\nlocal_batch_size = "


@pytest.mark.parametrize(("mode", "active", "tokens"), [("mode = 'full'", 22.7, 6_200), (OPERATORS, 49.5, 6_700)])
def test_a_run_of_2024_on_eight_gpus(mode: str, active: float, tokens: float) -> None:
    """pytorch/torchtitan pull request 135, of March 2024: Llama 2 7B, eager, on 8 H100 of 95 GiB."""
    job = read(LLAMA2 + mode, ".toml", cluster="grand-teton-h100:1").job
    answer = simulate(load_job(job, ["framework.release=2024-03"])).to_dict()
    assert answer["memory"]["peak_allocated_gib"] == pytest.approx(active, rel=0.05)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(tokens, rel=0.05)


def test_a_run_of_experts_that_fits_with_half_the_batch() -> None:
    """pytorch/torchtitan issue 1789, of October 2025: 73.3 GiB and 11,250 to 11,760 tokens/s a GPU with a local
    batch of 4 on 8 H100 of 80 GB, out of memory with 8."""
    half, whole = (simulate(read(f"{DEEPSEEK}{batch}\n", ".toml").job) for batch in (4, 8))
    answer = half.to_dict()
    assert half.fits and not whole.fits
    assert answer["memory"]["peak_reserved_gib"] == pytest.approx(73.3, rel=0.08)
    assert answer["tokens_per_s_per_gpu"] == pytest.approx(11_500, rel=0.05)


# --------------------------------------------------------------------------------------------------- edits

CHANGED: tuple[tuple[dict[str, Any], int, dict[str, Any]], ...] = (
    ({"tp": 4, "pp": 1, "fsdp": True, "recompute": "none"}, 8, {}),
    (
        {"tp": 2, "pp": 2, "fsdp": True, "recompute": "operators", "partition": [17, 15]},
        16,
        {"compile": False, "cuda_graphs": False},
    ),
    ({"tp": 8, "pp": 1, "fsdp": True, "recompute": "full"}, 4, {"compile": True, "overlap": {"tp": True}}),
)
"""Plans, global batches and traits to which files are edited."""

MODE = REGISTRY.replace("FullAC.Config()", 'ActivationCheckpointConfig(mode="full")')
FLAGS = "--compile.enable --compile.no_enable_async_tensor_parallel activation-checkpoint:selective"


@pytest.mark.parametrize(
    ("text", "suffix", "words"),
    [
        (REGISTRY, ".py", ()),
        (REGISTRY, ".py", ("activation-checkpoint:none",)),
        (MODE, ".py", ("--config", "a_run")),
        (f"{START}\n", ".sh", ()),
        (f"{START} {FLAGS}\n", ".sh", ()),
        (TITAN, ".toml", ()),
        (f"{START} $@\n", ".sh", ()),
    ],
)
def test_a_configuration_is_overridden_by_flags_that_its_parser_takes(
    text: str, suffix: str, words: tuple[str, ...]
) -> None:
    """Whatever a function sets, flags change it; those that say a switch, a list of lists, and a policy are of tyro's
    kind, and the policy is the last word.
    """
    with reading_launch_files(LaunchOptions(arguments=words)):
        file = parse_launch_text(text, f"run{suffix}", suffix)
        found = import_file(file, form="torchtitan", cluster="dgx-h100:2")
        before = load_job(found.job)
        for plan, batch, traits in drawn(CHANGED, keep=2):
            framework = found.job["framework"]
            stated = {**framework, "set": {**framework.get("set", {}), **traits}}
            described = {**found.job, "plan": plan, "batch": {**found.job["batch"], "global": batch}}
            after, edited, launch, back = load_job({**described, "framework": stated}), EditedFiles(file), found, before
            for _ in range(2):
                edited = apply_setting_changes(edited, list_changed_settings(launch, edited.file, back, after))
                again = parse_launch_text(edited.file.text, file.where, suffix, options=edited.file.options)
                edited = replace(edited, file=again)
                launch = import_file(again, form="torchtitan", cluster="dgx-h100:2")
                back = load_job(launch.job)
            assert flatten_job(back) == flatten_job(after)
            assert suffix != ".py" or edited.file.text == text
            arguments = [*edited.file.options.arguments]
            if suffix != ".toml":
                script = edited.file.text.replace("$@", shlex.join(arguments))
                assert_taken_by_tyro(arguments if suffix == ".py" else shlex.split(script))


def assert_taken_by_tyro(words: Sequence[str]) -> None:
    """Checks that words are as tyro takes them."""
    policies = [number for number, word in enumerate(words) if word.startswith("activation-checkpoint:")]
    assert policies in ([], [len(words) - 1]), words
    assert not {"True", "False", "true", "false"} & {*words}
    assert not any(word.startswith("[") for word in words)


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
    my_run, cycle = (LaunchOptions(arguments=("--config", name)) for name in ("my_run", "cycle"))
    with pytest.raises(OpenQuestions, match=r"a_run\(\): what it returns does not stand in a file here"):
        import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, my_run), ["model=llama3-8b"])
    (tmp_path / "shared").mkdir()
    beside = "from mine.run import cycle\n\ndef round_and_round() -> Trainer.Config:\n    return cycle()\n"
    (tmp_path / "shared" / "base.py").write_text(REGISTRY + beside, "utf-8")
    (folder / "run.py").write_text(IMPORTS, "utf-8")
    found = import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, my_run), cluster="dgx-h100:4")
    assert found.job == read(REGISTRY.replace("TP = 2, 2", "TP = 2, 8"), ".py", cluster="dgx-h100:4").job
    assert found.places["plan.replicate"].startswith(str(tmp_path / "mine" / ".." / "shared" / "base.py"))
    with pytest.raises(OpenQuestions, match="does not stand in a file here"):
        import_file(parse_launch_text(IMPORTS, "run.py", ".py", folder, cycle), ["model=llama3-8b"])
