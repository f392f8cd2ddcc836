"""``meshcast import`` and ``export`` of launch files, and commands that take them as jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from meshcast.simulator import load_job
from meshcast.simulator.formats.launch.detect import detect_program
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.formats.launch.programs.refused import REFUSED
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, FORMATS
from tests.experiments.cli.test_app import answer, run

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "launch-files.md").read_text("utf-8")
FILES = dict(re.findall(r"^`(\S+)`:\n\n```\w+\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
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

SCRIPT = """
#SBATCH --nodes=2
TP=${TP:-2}
ARGS="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024"
torchrun --nproc-per-node 8 pretrain_gpt.py $ARGS --tensor-model-parallel-size $TP --micro-batch-size 2 \\
    --global-batch-size 32 --bf16 --vocab-size 32000 --some-new-flag 3 --lr 1e-4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page and a script, which is the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "small.sh").write_text(SCRIPT, "utf-8")
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


@pytest.mark.parametrize(("command", "printed"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_what_the_page_shows_is_printed(folder: Path, command: str, printed: str) -> None:
    """A question is what a command writes on stderr; ``...`` stands for lines that are left out."""
    found = run(*command.split())
    whole = found.stdout if found.exit_code == 0 else found.stderr
    assert found.exit_code == (2 if "it leaves open what decides the answer" in printed else 0)
    parts = [part for part in re.split(r"^\.\.\.\n", printed, flags=re.MULTILINE) if part]
    assert len(parts) > 1 or whole == printed
    for part in parts:
        assert part in whole
        whole = whole.partition(part)[2]


@pytest.mark.parametrize("name", PROGRAMS)
def test_predict_takes_every_file_of_the_page(folder: Path, name: str) -> None:
    given = {
        "run.sh": ("plan.tp=4",),
        "ds.json": ("model=llama3-8b", "batch.sequence=4096"),
        "fsdp.yaml": ("model=llama3-8b", "batch.sequence=4096", "batch.micro=2"),
        "actor.sh": ("train.mode=full",),
    }
    changes = ("cluster=dgx-h100:16", *given.get(name, ()))
    recipe = ["--args=--recipe=llama3_8b_pretrain_config"] if name == "llama3_8b_pretrain.yaml" else []
    found = run("predict", name, *(word for change in changes for word in ("--set", change)), *recipe, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["step_time_s"] > 0
    assert f"meshcast: {name} is read as a launch file of" in found.stderr


def test_predict_says_what_it_assumed_and_did_not_understand(folder: Path) -> None:
    found = run("predict", "small.sh")
    assumed = "assumed cluster dgx-h100:2 (Megatron-LM does not say which GPUs; change it with --set cluster=...)"
    assert assumed in found.stderr
    assert "approximated --some-new-flag: meshcast does not know it" in found.stderr
    assert "meshcast import small.sh" in found.stderr
    assert "16 x h100-sxm in 2 nodes" in found.stdout
    assert found.stdout.splitlines()[-1] == "unknown    --some-new-flag: not in this forecast"


@pytest.mark.parametrize(
    ("program", "text", "message"),
    [
        ("megatron", SCRIPT.replace("--tensor-model-", "--tensor-"), "--tensor-model-parallel-size?"),
        ("megatron", f"{SCRIPT.rstrip()} --sequence-paralel", "--sequence-parallel?"),
        ("megatron", f"{SCRIPT.rstrip()} --overlap-grads-reduce", "--overlap-grad-reduce?"),
        ("torchtitan", "[parallelism]\ntensor_paralel_degree = 2", "parallelism.tensor_parallel_degree?"),
        ("deepspeed", '{"zero_optimization": {"stge": 3}}', "zero_optimization.stage?"),
    ],
)
def test_a_mistyped_setting_is_told_the_nearest_one(folder: Path, program: str, text: str, message: str) -> None:
    (folder / "mistyped").write_text(text, "utf-8")
    found = run("import", program, "mistyped", "--model", "gpt2-124m", "--json")
    assert found.exit_code == 2
    whys = [entry["why"] for entry in json.loads(found.stdout)["error"]["questions"]]
    assert any(why.startswith("meshcast does not know it") and why.endswith(f"Did you mean {message}") for why in whys)


@pytest.mark.parametrize(("tp", "bounded"), [(4, True), (8, False)])
def test_an_approximation_is_bounded_where_the_other_setting_is_possible(folder: Path, tp: int, bounded: bool) -> None:
    """Eight heads of keys and values are not divided by 16 ranks, which all-to-alls would need."""
    found = answer("predict", "run.sh", "--env", f"TP={tp}", "--json")["launch_file"]
    assert "--cp-comm-type" in [entry["shown"] for entry in found["approximated"]]
    assert [entry["shown"] for entry in found["bounded"]] == ["--cp-comm-type"] * bounded
    assert all(entry["step_ratio"] > 1 for entry in found["bounded"])


def test_an_ordinary_job_is_predicted_without_a_word(folder: Path) -> None:
    (folder / "plain.yaml").write_text("{model: gpt2, cluster: 'dgx-h100:1'}", "utf-8")
    assert run("predict", "plain.yaml").stderr == ""


def test_the_answer_in_json_lists_every_class_of_settings(folder: Path) -> None:
    found = answer("import", "megatron", "small.sh", "--json")
    unknown = [entry["shown"] for entry in found["approximated"] if not entry["is_known"]]
    assert unknown == ["--some-new-flag"] and found["questions"] == []
    assert [entry["key"] for entry in found["assumed"]] == ["cluster"]
    assert "--lr" in [entry["shown"] for entry in found["without_influence"]]
    assert found["job"]["plan"] == {"tp": 2, "zero": 0, "sequence_parallel": False}
    assert load_job(found["job"]).cluster.gpus == 16


def test_a_job_is_written_and_is_read_again(folder: Path) -> None:
    done = run("import", "megatron", "small.sh", "--cluster", "dgx-b200:2", "--out", "made.yaml")
    assert done.exit_code == 0 and "wrote made.yaml" in done.stderr
    assert load_job("made.yaml").cluster.name == "dgx-b200:2"
    assert run("export", "made.yaml", "--to", "nemo", "--out", "made-nemo.yaml").exit_code == 0
    assert yaml.safe_load((folder / "made-nemo.yaml").read_text())["model"]["tensor_model_parallel_size"] == 2


def test_the_suffix_says_the_format(folder: Path) -> None:
    """A job in JSON has no comments; a file that promises a table is refused."""
    assert run("import", "megatron", "small.sh", "--out", "made.json").exit_code == 0
    assert load_job(json.loads((folder / "made.json").read_text())).batch.micro == 2
    for words in (["megatron", "small.sh"], ["nccl-tests", "small.sh"]):
        found = run("import", *words, "--out", "made.csv")
        assert found.exit_code == 2 and "is written as ." in found.stderr and not (folder / "made.csv").exists()
    assert "Write made.yaml" in run("import", "megatron", "small.sh", "--out", "made.csv").stderr


def test_a_model_beside_a_script_counts(folder: Path) -> None:
    found = run("import", "megatron", "small.sh", "--model", "gpt2-124m", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["job"]["model"] == "gpt2-124m"


def test_a_vocabulary_that_nothing_tells_is_that_of_the_shape(folder: Path) -> None:
    """With the tokenizer of a folder, a script of the shape of Llama 3 8B has its vocabulary, not that of GPT-2."""
    shape = (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
        "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
        "--untie-embeddings-and-output-weights --max-position-embeddings 8192 --seq-length 4096 "
        "--micro-batch-size 1 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer --bf16"
    )
    (folder / "llama.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {shape}\n", "utf-8")
    found = run("import", "megatron", "llama.sh").stdout
    assert "model: llama3-8b" in found and "128,256 of llama3-8b, which has this" in found
    other = shape.replace("14336", "14592")
    (folder / "other.sh").write_text(f"torchrun --nproc-per-node 8 pretrain_gpt.py {other}\n", "utf-8")
    assert answer("import", "megatron", "other.sh", "--json")["job"]["model"]["vocab"] == 50257


def test_dropout_hides_no_preset(folder: Path) -> None:
    """Dropout that a program has by default changes no shape: neither the vocabulary nor the preset is lost by it."""
    shape = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
    shape |= {"num_query_groups": 8, "normalization": "rmsnorm", "activation": "fast-swiglu", "bias": False}
    shape |= {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    model = {**shape, "encoder_seq_length": 8192, "max_position_embeddings": 8192, "tensor_model_parallel_size": 8}
    (folder / "llama.yaml").write_text(yaml.safe_dump({"trainer": {"devices": 8}, "model": model}))
    found = run("import", "nemo", "llama.yaml").stdout
    assert "preset: llama3-70b  # the preset of the shape" in found and "dropout: 0.1  # default of NeMo" in found
    assert "--vocab-size" not in found and "128,256 of llama3-70b" in found
    vocabulary = "assumed model.vocab 128256 (no vocabulary is stated"
    assert vocabulary in run("predict", "llama.yaml").stderr
    changed = load_job("llama.yaml", ["model.vocab=128000"]).model
    assert (changed.vocab, changed.layers, changed.dropout) == (128_000, 80, 0.1)


def test_what_is_assumed_is_said_with_its_value(folder: Path) -> None:
    (folder / "auto.json").write_text('{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}')
    found = run("predict", "auto.json", "--set", "model=gpt2-124m", "--assume-defaults").stderr
    for words in ("cluster dgx-h100:1 (DeepSpeed", "batch.micro 1 (auto:", "precision.compute bf16 (auto:"):
        assert f"assumed {words}" in found
    assert found.count("change it with --set ") == 5  # the length of sequences and recomputation, too


def test_what_decides_and_is_not_stated_is_asked_for_until_it_is_answered(folder: Path) -> None:
    words = ("predict", "ds.json", "--json", "--set", "model=llama3-8b")
    asked = run(*words)
    questions = json.loads(asked.stdout)["error"]["questions"]
    assert asked.exit_code == 2 and [entry["answers"] for entry in questions] == [["batch.sequence=8192"]]
    assumed, answered = answer(*words, "--assume-defaults"), answer(*words, "--set", "batch.sequence=8192")
    assert assumed["step_time_s"] == answered["step_time_s"]
    assert assumed["interval"]["regime"] == "unknown"


@pytest.mark.parametrize("command", ["compare", pytest.param("why", marks=pytest.mark.slow), "scale"])
def test_other_commands_take_launch_files(folder: Path, command: str) -> None:
    more = {"compare": ["--set", "plan.tp=4"], "why": [], "scale": ["--gpus", "8,16"]}[command]
    found = run(command, "small.sh", *more)
    assert found.exit_code == 0, found.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "bad.sh"], "bad.sh:5 --micro-batch-size is 'two': it takes a number. Write a number such as 8"),
        (["predict", "uneven.sh"], "uneven.sh:5 --tensor-model-parallel-size (plan.tp) is 3: model.heads"),
        (["predict", "empty.sh"], "it is no launch file of a program that meshcast reads: Megatron-LM, Megatron-D"),
        (["import", "megatron", "job.toml"], "job.toml: it states no setting of Megatron-LM. Name a .sh file"),
        (["import", "deepspeed", "ds.json"], "takes from elsewhere (--set model=llama3-8b)"),
        (["import", "megatorn", "small.sh"], "there is no format of this name. Did you mean 'megatron'?"),
        (["import", "megatron", "small.sh", "--tokens", "4"], "--tokens is 4: megatron takes no such option"),
        (["import", "kineto", "small.sh", "--model", "gpt2"], "--model is 'gpt2': kineto takes no such option"),
        (["import", "megatron", "absent.sh"], "absent.sh: it cannot be read (No such file or directory)"),
        (["export", "job.yaml"], "--to: the program is missing. Write meshcast export job.yaml --to megatron"),
        (["export", "job.yaml", "--to", "megatorn"], "there is no format of this name. Did you mean 'megatron'?"),
        (["export", "job.yaml", "--to", "trl"], "such files are read, not written"),
        (["export", "schedule", "1f1b", "--to", "nemo"], "--to is 'nemo': it is for a job"),
    ],
)
def test_errors_say_where_and_what_would_work(folder: Path, words: list[str], message: str) -> None:
    (folder / "bad.sh").write_text(SCRIPT.replace("--micro-batch-size 2", "--micro-batch-size two"), "utf-8")
    (folder / "uneven.sh").write_text(SCRIPT.replace("TP:-2", "TP:-3"), "utf-8")
    (folder / "empty.sh").write_text("echo hello\n", "utf-8")
    found = run(*words)
    assert found.exit_code == 2 and message in found.stderr.replace("\n", " ")
