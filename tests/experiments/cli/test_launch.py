"""``meshcast import`` and ``export`` of launch files, and commands that take them as jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from meshcast.simulator import load_job
from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.detect import detect_program
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.formats.launch.programs.refused import REFUSED
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, FORMATS
from tests.draws import drawn
from tests.experiments.cli.samples import COMMAND_FILES, ROOT, SCRIPT, answer, run

PAGE = (ROOT / "docs" / "launch-files.md").read_text("utf-8")
FILES = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
LONGEST = "predict run.sh --assume-defaults"
COMMANDS = re.findall(r"^```console\n\$ meshcast (.*?)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

PROGRAMS = {
    "run.sh": "megatron",
    "job.toml": "torchtitan",
    "ds.json": "deepspeed",
    "fsdp.yaml": "accelerate",
    "sft.yaml": "llamafactory",
    "llama3_8b_pretrain.yaml": "megatron-bridge",
    "lora.yaml": "torchtune",
    "actor.sh": "verl",
}
"""The program of every launch file of the page."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page and those of commands, which is the working directory."""
    for name, text in {**COMMAND_FILES, **FILES}.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_shows_a_file_of_every_family(folder: Path) -> None:
    for name, program in PROGRAMS.items():
        assert detect_program(read_launch_file(folder / name)).name == program
    assert FILES.keys() == PROGRAMS.keys() | {"job.yaml"}


def test_the_page_names_every_program() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| .* \|(.*)\|$", PAGE, re.MULTILINE))
    assert rows.keys() == FORMATS.keys()
    assert {name for name, written in rows.items() if written.strip()} == set(EXPORTS)
    refused = PAGE.partition("## Programs that are refused")[2].partition("\n## ")[0].replace("\n", " ")
    assert all(program.name in refused for program in REFUSED)


@pytest.mark.parametrize(("command", "printed"), drawn(COMMANDS, keep=lambda case: case[0] != LONGEST))
def test_what_the_page_shows_is_printed(folder: Path, command: str, printed: str) -> None:
    """A question is what a command writes on stderr; ``...`` stands for lines that are left out."""
    done = run(*command.split())
    whole = done.stdout if done.exit_code == 0 else done.stderr
    assert done.exit_code == (2 if "it leaves open what decides the answer" in printed else 0)
    parts = [part for part in re.split(r"^\.\.\.\n", printed, flags=re.MULTILINE) if part]
    assert len(parts) > 1 or whole == printed
    for part in parts:
        assert part in whole
        whole = whole.partition(part)[2]


@pytest.mark.parametrize("name", drawn(PROGRAMS, keep=("actor.sh", "lora.yaml", "llama3_8b_pretrain.yaml", "sft.yaml")))
def test_predict_takes_every_file_of_the_page(folder: Path, name: str) -> None:
    """The commands of the page show the others."""
    stated = {
        "run.sh": ("plan.tp=4",),
        "ds.json": ("model=llama3-8b", "batch.sequence=4096"),
        "fsdp.yaml": ("model=llama3-8b", "batch.sequence=4096", "batch.micro=2"),
        "actor.sh": ("train.mode=full",),
    }
    changes = ("cluster=dgx-h100:16", *stated.get(name, ()))
    recipe = ["--args=--recipe=llama3_8b_pretrain_config"] if name == "llama3_8b_pretrain.yaml" else []
    done = run("predict", name, *(word for change in changes for word in ("--set", change)), *recipe, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["step_time_s"] > 0
    assert f"meshcast: {name} is read as a launch file of" in done.stderr


def test_predict_says_what_it_assumed_and_did_not_understand(folder: Path) -> None:
    """The page: `tests/snapshots/predict.txt`."""
    done = run("predict", "small.sh")
    assumed = "assumed cluster dgx-h100:2 (Megatron-LM does not say which GPUs; change it with --set cluster=...)"
    assert assumed in done.stderr and "approximated --some-new-flag: meshcast does not know it" in done.stderr
    assert "meshcast import small.sh" in done.stderr
    assert done.stdout.splitlines()[-1] == "unknown    --some-new-flag: not in this forecast"


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [
        ("megatron", SCRIPT.replace("--tensor-model-", "--tensor-"), "--tensor-model-parallel-size?"),
        ("megatron", f"{SCRIPT.rstrip()} --overlap-grads-reduce", "--overlap-grad-reduce?"),
        ("torchtitan", "[parallelism]\ntensor_paralel_degree = 2", "parallelism.tensor_parallel_degree?"),
        ("deepspeed", '{"zero_optimization": {"stge": 3}}', "zero_optimization.stage?"),
    ],
)
def test_a_mistyped_setting_is_told_the_nearest_one(folder: Path, program: str, text: str, message: str) -> None:
    (folder / "mistyped").write_text(text, "utf-8")
    done = run("import", program, "mistyped", "--model", "gpt2-124m", "--json")
    assert done.exit_code == 2
    whys = [entry["why"] for entry in json.loads(done.stdout)["error"]["questions"]]
    assert any(why.startswith("meshcast does not know it") and why.endswith(f"Did you mean {message}") for why in whys)


@pytest.mark.parametrize(("tp", "bounded"), [(4, True), (8, False)])
def test_an_approximation_is_bounded_where_the_other_setting_is_possible(folder: Path, tp: int, bounded: bool) -> None:
    """Eight heads of keys and values are not divided by 16 ranks, which all-to-alls would need."""
    said = answer("predict", "run.sh", "--env", f"TP={tp}")["launch_file"]
    assert "--cp-comm-type" in [entry["shown"] for entry in said["approximated"]]
    assert [entry["shown"] for entry in said["bounded"]] == ["--cp-comm-type"] * bounded
    assert all(entry["step_ratio"] > 1 for entry in said["bounded"])


def test_an_ordinary_job_is_predicted_without_a_word(folder: Path) -> None:
    assert run("predict", "small.yaml").stderr == ""


def test_the_answer_in_json_lists_every_class_of_settings(folder: Path) -> None:
    said = answer("import", "megatron", "small.sh")
    unknown = [entry["shown"] for entry in said["approximated"] if not entry["is_known"]]
    assert unknown == ["--some-new-flag"] and said["questions"] == []
    assert [entry["key"] for entry in said["assumed"]] == ["cluster"]
    assert "--lr" in [entry["shown"] for entry in said["without_influence"]]
    assert said["job"]["plan"] == {"tp": 2, "zero": 0, "sequence_parallel": False}
    assert load_job(said["job"]).cluster.gpus == 16
    assert run("import", "small.sh").stdout == run("import", "megatron", "small.sh").stdout


def test_a_job_is_written_and_is_read_again(folder: Path) -> None:
    """A job in JSON has no comments."""
    done = run("import", "megatron", "small.sh", "--cluster", "dgx-b200:2", "--out", "made.yaml")
    assert done.exit_code == 0 and "wrote made.yaml" in done.stderr
    assert load_job("made.yaml").cluster.name == "dgx-b200:2"
    assert run("export", "made.yaml", "--to", "nemo", "--out", "made-nemo.yaml").exit_code == 0
    assert yaml.safe_load((folder / "made-nemo.yaml").read_text())["model"]["tensor_model_parallel_size"] == 2
    assert run("import", "megatron", "small.sh", "--out", "made.json").exit_code == 0
    assert load_job(json.loads((folder / "made.json").read_text())).batch.micro == 2


def test_a_model_beside_a_script_counts(folder: Path) -> None:
    assert answer("import", "megatron", "small.sh", "--model", "gpt2-124m")["job"]["model"] == "gpt2-124m"


def test_a_vocabulary_that_nothing_tells_is_that_of_the_shape(folder: Path) -> None:
    """With the tokenizer of a folder, a script of the shape of Llama 3 8B has its vocabulary, not that of GPT-2."""
    shape = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --max-position-embeddings 8192 --seq-length 4096 "
        "--micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer --bf16"
    )
    (folder / "llama.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {shape}\n", "utf-8")
    printed = run("import", "megatron", "llama.sh").stdout
    assert "model: llama3-8b" in printed and "128,256 of llama3-8b, which has this" in printed
    other = shape.replace("14336", "14592")
    (folder / "other.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {other}\n", "utf-8")
    assert answer("import", "megatron", "other.sh")["job"]["model"]["vocab"] == 50257


def test_dropout_hides_no_preset(folder: Path) -> None:
    """Dropout that a program has by default changes no shape: neither the vocabulary nor the preset is lost by it."""
    shape = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    shape |= {"num_query_groups": 8, "normalization": "rmsnorm", "activation": "fast-swiglu", "bias": False}
    shape |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    model = {**shape, "encoder_seq_length": 8192, "max_position_embeddings": 8192, "tensor_model_parallel_size": 8}
    (folder / "llama.yaml").write_text(yaml.safe_dump({"trainer": {"devices": 8}, "model": model}))
    printed = run("import", "nemo", "llama.yaml").stdout
    assert "preset: llama3-70b  # the preset of the shape" in printed and "dropout: 0.1  # default of NeMo" in printed
    assert "--vocab-size" not in printed and "128,256 of llama3-70b" in printed
    changed = load_job("llama.yaml", ["model.vocab=128000"]).model
    assert (changed.vocab, changed.layers, changed.dropout) == (128_000, 80, 0.1)


def test_what_is_assumed_is_said_with_its_value(folder: Path) -> None:
    (folder / "auto.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}')
    said = run("predict", "auto.json", "--set", "model=gpt2-124m", "--assume-defaults").stderr
    for words in ("cluster dgx-h100:1 (DeepSpeed", "batch.micro 1 (auto:", "precision.compute bf16 (auto:"):
        assert f"assumed {words}" in said
    assert said.count("change it with --set ") == 5  # the length of sequences and recomputation, too


def test_what_decides_and_is_not_stated_is_asked_for_until_it_is_answered(folder: Path) -> None:
    words = ("predict", "ds.json", "--set", "model={preset: llama3-8b, layers: 2}")
    asked = run(*words, "--json")
    questions = json.loads(asked.stdout)["error"]["questions"]
    assert asked.exit_code == 2 and [entry["answers"] for entry in questions] == [["batch.sequence=8192"]]
    assumed, answered = answer(*words, "--assume-defaults"), answer(*words, "--set", "batch.sequence=8192")
    assert assumed["step_time_s"] == answered["step_time_s"]
    assert assumed["interval"]["regime"] == "unknown"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("compare", ["--set", "plan.tp=4"]),
        ("scale", ["--gpus", "8,16"]),
        ("search", ["--set", "plan.tp=[2,4]", "--set", "plan.recompute=auto", "--top", "2"]),
        pytest.param("why", [], marks=pytest.mark.slow),
    ],
)
def test_other_commands_take_launch_files(folder: Path, command: str, options: list[str]) -> None:
    done = run(command, "small.sh", *options)
    assert done.exit_code == 0, done.stderr
    assert command != "search" or "no plan of the space that fits with 95 % is faster" in done.output


@pytest.mark.parametrize(("total", "pp", "passes"), [(256, 4, 16), (16, 4, 0), (256, 1, 0)])
def test_several_passes_through_a_pipeline_of_torchtitan_are_named(total: int, pp: int, passes: int) -> None:
    text = f"""[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 4\nglobal_batch_size = {total}
seq_len = 8192\n[parallelism]\npipeline_parallel_degree = {pp}\n"""
    imported = import_text(text, "job.toml", "torchtitan", cluster="dgx-h100:2")
    whys = {entry.shown: entry.why for entry in imported.findings.approximated}
    why = whys.get("training.global_batch_size", "")
    assert bool(why) == bool(passes) and (not passes or f"over {passes} passes through the pipeline" in why)
