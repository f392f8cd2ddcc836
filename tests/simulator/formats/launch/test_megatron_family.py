"""Files of Megatron-LM, its forks and the programs on Megatron-Core are read as the jobs that they are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.launch.convert import export_job, import_file, import_text
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, parse_launch_text
from meshcast.simulator.formats.launch.programs.recipes import load_recipes
from meshcast.simulator.formats.launch.python_text import Built, OpenValue, PythonText
from meshcast.simulator.formats.launch.reading import SAME_WITHOUT
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import load_model
from tests.strategies import some

SHAPE = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
    " --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 "
)
RICH = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --seq-length 4096"
    " --max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 2 --global-batch-size 128 --bf16"
    " --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
    " --overlap-grad-reduce --overlap-param-gather --num-layers-per-virtual-pipeline-stage 4 --recompute-granularity"
    " selective --recompute-modules core_attn mlp --attention-backend flash --lr 1e-4 --train-iters 50"
    " --save-interval 10 --deterministic-mode --log-throughput --clip-grad 1.0 --tokenizer-type NullTokenizer"
)


def import_script(flags: str, *changes: str) -> ImportedJob:
    """Imports arguments of Megatron-LM on 16 GPUs."""
    return import_text(f"torchrun pretrain_gpt.py {flags}", "run.sh", "megatron", "dgx-h100:2", changes=changes)


def parse(text: str, name: str, arguments: str = "", folder: Path = Path()) -> Any:
    """The launch file of a text, with arguments of its command line."""
    options = LaunchOptions(arguments=tuple(arguments.split()))
    return parse_launch_text(text, name, Path(name).suffix, folder, options)


def read(text: str, name: str, arguments: str = "", **given: Any) -> ImportedJob:
    return import_file(parse(text, name, arguments), **given)


# ----------------------------------------------------------------------------------- old releases


@pytest.mark.parametrize(
    ("flags", "recompute"),
    [
        ("--checkpoint-activations", "full"),
        ("--checkpoint-activations --checkpoint-num-layers 1", "full"),
        ("--activations-checkpoint-method uniform", "full"),
        ("--recompute-activations", "selective"),
        ("--moe-layer-recompute --num-experts 4", "selective"),
        ("", "none"),
    ],
)
def test_what_old_and_new_releases_recompute(flags: str, recompute: str) -> None:
    keys = flatten_job(load_job(import_script(f"{SHAPE} --bf16 {flags}").job))
    assert keys["plan.recompute"] == recompute


@pytest.mark.parametrize(
    ("flags", "release", "layers"),
    [
        ("--checkpoint-activations", "2023-04", None),
        ("--checkpoint-activations --recompute-method block --recompute-num-layers 4", "2023-04", None),
        ("--checkpoint-activations --checkpoint-num-layers 1", "2021-07", None),
        ("--activations-checkpoint-method block --activations-checkpoint-num-layers 4", "2022-04", 4),
        ("--DDP-impl local --recompute-granularity full --recompute-method block --recompute-num-layers 4", None, 4),
    ],
)
def test_old_flags_date_their_release(flags: str, release: str | None, layers: int | None) -> None:
    """--checkpoint-activations recomputes all layers, whatever stands beside it."""
    imported = import_script(f"{SHAPE} --fp16 {flags}")
    keys = flatten_job(load_job(imported.job))
    assert (keys.get("framework.release"), keys.get("plan.recompute.layers")) == (release, layers)
    stated = import_script(f"{SHAPE} --fp16 {flags}", "framework.release=2021-05")
    assert "framework.release" not in stated.assumed


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ("", "flash"),
        ("--DDP-impl local", "unfused"),
        ("--DDP-impl local --use-flash-attn", "flash"),
        ("--transformer-impl local", "unfused"),
        ("--data-impl mmap --transformer-impl transformer_engine", "flash"),
    ],
)
def test_attention_is_that_of_the_release_which_has_the_flags(flags: str, attention: str) -> None:
    assert load_job(import_script(f"{SHAPE} --fp16 {flags}").job).framework.attention == attention


EXPERTS = "--num-experts 8 --moe-router-topk 2"


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("", False),
        ("--cuda-graph-impl none --cuda-graph-modules attn", False),
        ("--cuda-graph-impl full_iteration", True),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", True),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope mlp", ("mlp",)),
        (
            f"--cuda-graph-impl transformer_engine --cuda-graph-modules moe_router attn {EXPERTS}",
            ("attn", "moe_router"),
        ),
        (f"--cuda-graph-impl local --cuda-graph-modules moe_router {EXPERTS}", ("moe_router", "moe_preprocess")),
        ("--external-cuda-graph", ("attn", "mlp")),
        (f"--enable-cuda-graph --cuda-graph-scope full {EXPERTS}", ("attn", "mlp", "moe_router", "moe_preprocess")),
    ],
)
def test_modules_that_are_graphs(flags: str, graphs: bool | tuple[str, ...]) -> None:
    assert load_job(import_script(f"{SHAPE} --bf16 {flags}").job).framework.cuda_graphs == graphs


def test_a_file_of_an_old_release_goes_round() -> None:
    job = load_job(import_script(f"{SHAPE} --fp16 --DDP-impl local --checkpoint-activations").job)
    exported = export_job(job, "megatron", lambda data, folder: load_job(data, base=folder), lambda job: None)
    assert job.framework.name == "megatron-lm-2021"
    assert not exported.unsaid


@pytest.mark.parametrize(
    ("flags", "compute"),
    [
        ("", "fp32"),
        ("--bf16 --fp8-hybrid", "fp8-delayed"),
        ("--bf16 --fp8-format hybrid", "fp8-delayed"),
        ("--bf16 --fp8-format hybrid --fp8-recipe blockwise", "fp8-blockwise"),
    ],
)
def test_number_formats(flags: str, compute: str) -> None:
    assert flatten_job(load_job(import_script(f"{SHAPE} {flags}").job))["precision.compute"] == compute


# ------------------------------------------------------------------------------------ four classes


def test_every_understood_flag_is_listed_as_taken_or_as_idle_here() -> None:
    findings = import_script(RICH).findings
    taken = {entry.shown for entry in findings.taken}
    flags = set(re.findall(r"--[\w-]+", RICH))
    others = {entry.shown for entry in (*findings.ignored, *findings.approximated)}
    assert flags == (taken | others) & flags and not findings.questions
    understood = flags - {"--lr", "--deterministic-mode", "--log-throughput", "--clip-grad", "--tokenizer-type"}
    idle = {entry.shown for entry in findings.ignored if entry.why == SAME_WITHOUT}
    assert understood <= taken | idle and idle <= {"--attention-dropout", "--group-query-attention"}


@pytest.mark.parametrize("flag", some([(flag,) for flag in re.findall(r"--[a-z][^-]*(?:-[a-z][^-]*)*", RICH)], of=14))
def test_a_flag_that_is_dropped_changes_the_job_or_had_no_influence(flag: str) -> None:
    """Of the shape, plan or batch nothing is read from elsewhere: without its flag the job is another one, or asked."""
    whole = import_script(RICH)
    try:
        without = import_script(RICH.replace(flag, "", 1))
    except (OpenQuestions, ValueError):
        return
    listed = {entry.shown for entry in (*whole.findings.ignored, *whole.findings.approximated)}
    name = flag.split()[0]
    assert without.job != whole.job or name in listed or name in SAME_AS_DEFAULT


SAME_AS_DEFAULT = (
    *("--attention-backend", "--attention-dropout", "--group-query-attention", "--save-interval"),
    "--max-position-embeddings",
)
"""Flags of `RICH` that state the default, or count for whole runs alone; rotary positions have no table of them."""


@pytest.mark.parametrize(
    ("flags", "shown", "answer"),
    [
        ("--tensor-parallel-num-weight-shards 4", "--tensor-parallel-num-weight-shards", "plan.fsdp=true"),
        ("--heterogeneous-layers-config-path x.json", "--heterogeneous-layers-config-path", "model=gpt2-124m"),
        ("--recompute-granularity partial", "--recompute-granularity", "plan.recompute=full"),
        ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe", "precision.compute=fp8-tensorwise"),
        ("--some-shard-degree 4", "--some-shard-degree", ""),
    ],
)
def test_what_decides_and_is_not_understood_is_asked(flags: str, shown: str, answer: str) -> None:
    with pytest.raises(OpenQuestions) as raised:
        import_script(f"{SHAPE} --bf16 {flags}")
    assert [question.shown for question in raised.value.questions] == [shown]
    if answer:
        import_script(f"{SHAPE} --bf16 {flags}", answer)


@pytest.mark.parametrize("optimizer", ["sgd", "muon", "dist_muon"])
def test_other_optimizers_are_approximated(optimizer: str) -> None:
    found = {
        entry.shown: entry for entry in import_script(f"{SHAPE} --bf16 --optimizer {optimizer}").findings.approximated
    }
    assert "Adam is forecast" in found["--optimizer"].why and found["--optimizer"].errs


def test_models_with_an_encoder_are_not_read_as_decoders() -> None:
    with pytest.raises(OpenQuestions, match="an encoder and a decoder"):
        import_script(f"{SHAPE} --bf16 --encoder-num-layers 12")


def test_layers_of_stages_with_one_end_or_with_chunks() -> None:
    one_end = SHAPE.replace("--num-layers 16", "--num-layers 15")
    flags = f"{one_end} --bf16 --pipeline-model-parallel-size 4 --account-for-loss-in-pipeline-split"
    assert import_script(flags).job["plan"]["partition"] == [4, 4, 4, 3]
    uneven = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    uneven += " --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 2"
    flags = f"{SHAPE.replace('--num-layers 16', '--num-layers 22')} --bf16 {uneven}"
    assert import_script(flags).job["plan"]["partition"] == [2, 4, 4, 1] * 2


# ----------------------------------------------------------------------------------------- recipes


def size_of(name: str) -> float | None:
    """The parameters that the name of a recipe claims."""
    match = re.search(r"_(\d+)x(\d+)b|_(?:e16)|_(\d+)(?:[._p](\d))?(b|m)(?:_|$|\.)", name)
    if match is None or match[3] is None:
        return None
    number = (
        float(f"{match[3]}.{match[4]}")
        if match[4] and "_a" not in name[match.start() : match.end()]
        else float(match[3])
    )
    return number * (1e9 if match[5] == "b" else 1e6)


@pytest.mark.parametrize("program", ["nemo", "megatron_bridge"])
def test_recipes_have_models_of_the_size_that_their_names_claim(program: str) -> None:
    recipes = load_recipes(program)
    checked = 0
    for name, row in recipes.recipes.items():
        claimed = size_of(name)
        if claimed is not None:
            checked += 1
            assert load_model(row["model"]).parameters == pytest.approx(claimed, rel=0.35), name
        model = load_model(row["model"])
        assert ("expert_model_parallel_size" in row and row["expert_model_parallel_size"] > 1) <= (
            model.moe is not None
        )
    assert checked > 0.6 * len(recipes.recipes) and len(recipes.recipes) > 150
    assert set(recipes.aliases.values()) <= set(recipes.recipes)
    assert "@" in recipes.source


@pytest.mark.parametrize("name", some([(name,) for name in load_recipes("megatron_bridge").recipes], of=12))
def test_a_recipe_of_megatron_bridge_is_a_job(name: str) -> None:
    found = read("train: {}\nmodel: {}\nddp: {}\nlogger: {log_interval: 1}\n", "over.yaml", f"--recipe {name}")
    row = load_recipes("megatron_bridge").recipes[name]
    keys = flatten_job(load_job(found.job))
    assert keys["batch.global"] == row["global_batch_size"]
    assert keys["plan.tp"] == row.get("tensor_model_parallel_size", 1)
    assert keys["plan.recompute"] == row.get("recompute_granularity", "none")


@pytest.mark.parametrize("name", some([(name,) for name in load_recipes("nemo").recipes], of=10))
def test_a_recipe_of_nemo_is_a_job(name: str) -> None:
    model, kind, *variants = name.split(".")
    arguments = {"full": "peft_scheme=None", "performance": "performance_mode=True"}
    call = f"llm.{model}.{kind}_recipe({', '.join(arguments[variant] for variant in variants)})"
    found = read(f"from nemo.collections import llm\nrecipe = {call}\n", "run.py")
    row = load_recipes("nemo").recipes[name]
    keys = flatten_job(load_job(found.job))
    assert keys["batch.global"] == row["global_batch_size"]
    assert keys["plan.pp"] == row.get("pipeline_model_parallel_size", 1)
    assert keys.get("train.mode", "full") == row.get("peft", "full")


OVERRIDES = {
    "yaml": (
        "llama3_8b_pretrain_override.yaml",
        "model: {tensor_model_parallel_size: 2, sequence_parallel: true}\ntrain: {global_batch_size: 64}\n",
    ),
    "python": (
        "run.py",
        "from megatron.bridge.recipes.llama import llama3_8b_pretrain_config as config\n"
        "from megatron.bridge.training.pretrain import pretrain\n"
        "def main():\n    cfg = config()\n    degree = 1 * 2\n    cfg.model.tensor_model_parallel_size = degree\n"
        "    if degree > 1:\n        cfg.model.sequence_parallel = True\n    cfg.train.global_batch_size = 64\n"
        "    pretrain(cfg)\n"
        "if __name__ == '__main__':\n    main()\n",
    ),
    "command": (
        "run.sh",
        "NAME=llama3_8b\ntorchrun --nproc-per-node 8 training/run_recipe.py --recipe ${NAME}_pretrain_config -v \\\n"
        "    model.tensor_model_parallel_size=2 model.sequence_parallel=true train.global_batch_size=64\n",
    ),
}


def test_overrides_in_yaml_python_and_commands_are_the_same_job() -> None:
    arguments = {"yaml": "--recipe llama3_8b_pretrain_config"}
    jobs = [
        read(text, name, arguments.get(kind, ""), cluster="dgx-h100:1").job for kind, (name, text) in OVERRIDES.items()
    ]
    assert jobs[0] == jobs[1] == jobs[2]
    assert jobs[0]["plan"]["tp"] == 2 and jobs[0]["plan"]["cp"] == 2 and jobs[0]["batch"]["global"] == 64
    name, text = OVERRIDES["command"]
    taken = {entry.shown: entry.keys for entry in read(text, name).findings.taken}
    assert taken["--recipe"] == {"model.preset": "llama3-8b"}


def test_a_recipe_that_only_the_name_of_a_file_tells_is_asked_for() -> None:
    name, text = OVERRIDES["yaml"]
    with pytest.raises(OpenQuestions, match="--recipe llama3_8b_pretrain_config"):
        read(text, name)


BRIDGE_RECIPES = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _peft_common, _pretrain_common
from megatron.bridge.recipes.utils import adapt

def small_pretrain_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    return cfg

def large_pretrain_config():
    cfg = small_pretrain_config()
    cfg.train.global_batch_size = 64
    return cfg

def adapted_pretrain_config():
    cfg = small_pretrain_config()
    adapt(cfg.model)
    return cfg

def tuned_peft_config():
    cfg = _peft_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    return cfg
"""


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("small_pretrain_config", {"plan.tp": 4, "batch.global": 32, "batch.micro": 2, "batch.sequence": 4096}),
        ("large_pretrain_config", {"plan.tp": 4, "batch.global": 64, "batch.micro": 2}),
        ("large_pretrain_config model.tensor_model_parallel_size=2", {"plan.tp": 2, "batch.global": 64}),
        ("tuned_peft_config", {"train.mode": "lora", "train.rank": 32, "batch.global": 128, "batch.sequence": 2048}),
    ],
)
def test_a_command_line_names_the_function_of_a_file(recipe: str, expected: dict[str, Any]) -> None:
    keys = flatten_job(load_job(read(BRIDGE_RECIPES, "ours.py", f"--recipe {recipe}", cluster="dgx-h100:1").job))
    assert {key: keys.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "asked"), [("", "4 recipes: small_pretrain_config"), ("--recipe adapted_pretrain_config", "adapt")]
)
def test_which_function_is_meant_and_what_code_elsewhere_does_is_asked(arguments: str, asked: str) -> None:
    with pytest.raises(OpenQuestions, match=asked):
        read(BRIDGE_RECIPES, "ours.py", arguments)


def test_a_script_that_starts_a_file_of_a_recipe_is_that_file(tmp_path: Path) -> None:
    name, text = OVERRIDES["python"]
    tmp_path.joinpath(name).write_text(text, "utf-8")
    script = (
        f"#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\nsrun torchrun --nproc_per_node=$SLURM_GPUS_ON_NODE {name}\n"
    )
    started = import_file(parse(script, "run.sh", folder=tmp_path), cluster="dgx-h100:2").job
    assert started["plan"] == read(text, name, cluster="dgx-h100:2").job["plan"]
    assert started["cluster"] == "dgx-h100:2"


@pytest.mark.parametrize(("scheme", "cp", "mode"), [("'lora'", 1, "lora"), ("None", 2, "full")])
def test_a_module_of_nemo_counts_over_the_recipe_of_its_name(scheme: str, cp: int, mode: str) -> None:
    text = (
        "from nemo.collections.llm.recipes.finetune_default import default_finetune_recipe\n"
        f"def finetune_recipe(peft_scheme={scheme}):\n"
        "    recipe = default_finetune_recipe(model())\n"
        "    recipe.data.micro_batch_size = 2\n"
        "    if peft_scheme is None:\n        recipe.trainer.strategy.context_parallel_size = 2\n"
        "    return recipe\n"
    )
    keys = flatten_job(load_job(read(text, "gemma_2b.py", "--factory finetune_recipe", cluster="dgx-h100:1").job))
    assert (keys.get("plan.cp", 1), keys.get("train.mode", "full"), keys["batch.micro"]) == (cp, mode, 2)


@pytest.mark.parametrize(("optimizer", "sharding"), [("fused_adam", "ddp"), ("mcore_distributed_optim", "zero-1")])
def test_the_optimizer_of_nemo_1_has_its_name_in_its_section(optimizer: str, sharding: str) -> None:
    text = (
        "name: mcore_distributed_optim_run\ntrainer: {devices: 8, num_nodes: 1, precision: bf16}\n"
        "model: {name: megatron_gpt, micro_batch_size: 1, global_batch_size: 8, encoder_seq_length: 2048,"
        " num_layers: 12, hidden_size: 768, num_attention_heads: 12, tensor_model_parallel_size: 1,"
        f" pipeline_model_parallel_size: 1, optim: {{name: {optimizer}}}}}\n"
    )
    assert flatten_job(load_job(read(text, "gpt.yaml", cluster="dgx-h100:1").job))["plan.data"] == sharding


def test_a_recipe_of_nemo_in_a_command_is_that_of_python() -> None:
    command = 'nemo llm pretrain --factory "llama3_8b(num_nodes=2)" trainer.devices=8 data.global_batch_size=64\n'
    python = (
        "import nemo_run as run\nfrom nemo.collections import llm\n"
        "recipe = llm.llama3_8b.pretrain_recipe(num_nodes=2)\n"
        "recipe.trainer.devices = 8\nrecipe.data.global_batch_size = 64\nrun.run(recipe)\n"
    )
    jobs = [read(text, name).job for text, name in ((command, "run.sh"), (python, "run.py"))]
    assert jobs[0] == jobs[1] and jobs[0]["batch"]["global"] == 64


def test_a_job_goes_round_as_yaml_of_nemo_1() -> None:
    job = load_job(
        {
            **{"model": "gpt2-124m", "cluster": "dgx-h100:1", "framework": "nemo", "batch": {"global": 32, "micro": 2}},
            "plan": {"tp": 2, "fsdp": True, "recompute": "full"},
        }
    )
    text = export_job(job, "nemo", lambda data, folder: load_job(data, base=folder), lambda job: None).text
    assert "encoder_seq_length" in text and "fsdp: true" in text
    back = flatten_job(load_job(read(text, "recipe.yaml", cluster="dgx-h100:1").job))
    for key in ("plan.tp", "plan.data", "plan.recompute", "batch.global", "batch.micro", "model.layers"):
        assert back[key] == flatten_job(job)[key]


def test_an_unknown_recipe_is_asked_for() -> None:
    with pytest.raises(OpenQuestions, match="changes a recipe that it does not name"):
        read("model: {tensor_model_parallel_size: 2}\ntrain: {global_batch_size: 64}\n", "mine.yaml", model="llama3-8b")
    text = "from megatron.bridge.recipes.new import new_9b_pretrain_config\ncfg = new_9b_pretrain_config()\n"
    with pytest.raises(OpenQuestions, match="meshcast has no recipe or file 'new_9b_pretrain_config'"):
        read(text, "run.py")


def test_code_elsewhere_that_changes_a_recipe_is_asked_about() -> None:
    text = "from nemo.collections import llm\nfrom mine import tune\nrecipe = tune(llm.llama3_8b.pretrain_recipe())\n"
    with pytest.raises(OpenQuestions, match="its code, which may change the plan, is not here"):
        read(text, "run.py")


def test_arguments_of_a_python_file() -> None:
    text = (
        "import argparse\nfrom nemo.collections import llm\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--tp', type=int, default=4)\nparser.add_argument('--nodes', type=int, required=True)\n"
        "args = parser.parse_args()\nrecipe = llm.llama3_8b.pretrain_recipe(num_nodes=args.nodes)\n"
        "recipe.trainer.strategy.tensor_model_parallel_size = args.tp\n"
    )
    with pytest.raises(OpenQuestions, match=r"args\.nodes"):
        read(text, "run.py")
    found = read(text, "run.py", "--nodes 2")
    assert found.job["plan"]["tp"] == 4 and found.job["cluster"] == "dgx-h100:2"
    assert read(text, "run.py", "--nodes 2 --tp 8").job["plan"]["tp"] == 8


def test_nothing_of_a_python_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = (
        f"open({str(mark)!r}, 'w').write('x')\nimport os\nos.system('touch {mark}')\nx = 2 ** 99999\ny = 'a' * 10**9\n"
    )
    text += "z = 'a'\nfor i in [1] * 90:\n    z = z + z\nc = x.Config()\nc.self = c\nd = '%999999999d' % 1\n"
    followed = PythonText(text + "while True:\n    pass\n", "run.py")
    followed.follow()
    assert isinstance(followed.names["z"], OpenValue) and isinstance(followed.names["d"], OpenValue)
    assert not mark.exists()
    assert isinstance(followed.names["x"], OpenValue) and isinstance(followed.names["y"], OpenValue)


def test_methods_of_texts_are_followed() -> None:
    followed = PythonText("a = ' Ab '\nb = a.strip().lower() + a.upper()\nc = a.strip('A')\n", "run.py")
    followed.follow()
    assert followed.names["b"] == "ab AB " and isinstance(followed.names["c"], OpenValue)


def test_open_branches_leave_what_they_set_open() -> None:
    followed = PythonText("import x\nc = x.Config()\nif x.flag():\n    c.tp = 2\n", "run.py")
    followed.follow()
    built = followed.names["c"]
    assert isinstance(built, Built) and isinstance(built.fields["tp"], OpenValue)


# ------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "pp": 2, "chunks": 2, "recompute": "full"},
        {"fsdp": True, "tp": 1},
        {"cp": 2, "cp_scheme": "megatron-cp", "zero": 1, "recompute": "selective"},
    ],
)
def test_overrides_of_megatron_bridge_say_the_job(plan: dict[str, Any]) -> None:
    job = load_job(
        {
            "model": "llama3-8b",
            "cluster": "dgx-h100:2",
            "framework": "megatron-bridge",
            "batch": {"global": 64},
            "plan": plan,
        }
    )
    exported = export_job(job, "megatron-bridge", lambda data, folder: load_job(data, base=folder), lambda job: None)
    assert not exported.unsaid


# ------------------------------------------------------------------------------------------ Primus

PRIMUS = """\
work_group: mine
exp_name: trial
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:MODEL}.yaml
    overrides:
      global_batch_size: 64
      micro_batch_size: 2
      seq_length: 4096
      tensor_model_parallel_size: ${PRIMUS_TP:1}
"""


@pytest.mark.parametrize("name", some([(name,) for name in load_recipes("primus").models], of=10))
def test_models_of_primus_have_the_size_of_their_names(name: str) -> None:
    found = read(PRIMUS.replace("MODEL}", f"{name}}}"), "exp.yaml")
    job = load_job(found.job)
    assert found.form == "primus" and job.framework.name == "primus"
    claimed = re.search(r"_(\d+(?:\.\d+)?)B(?:_A|$)", name)
    if claimed:
        assert job.model.parameters == pytest.approx(float(claimed[1]) * 1e9, rel=0.35)
    keys = flatten_job(job)
    assert keys["plan.data"] == "zero-1" and keys["precision.compute"] == "bf16"


def test_variables_of_primus_come_from_the_environment() -> None:
    options = LaunchOptions(environment={"PRIMUS_TP": "4"})
    text = PRIMUS.replace("MODEL}", "llama3.1_8B}")
    assert import_file(parse_launch_text(text, "exp.yaml", ".yaml", options=options)).job["plan"]["tp"] == 4
    with pytest.raises(OpenQuestions, match="no preset of this model"):
        read(PRIMUS.replace("MODEL}", "new_9B}"), "exp.yaml")


# ------------------------------------------------------------------------------ Megatron-DeepSpeed

ENGINE: dict[str, Any] = {"train_batch_size": 64, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
WITH_ENGINE = (
    f"torchrun pretrain_gpt.py {SHAPE} --bf16 --tensor-model-parallel-size 2 --no-pipeline-parallel --deepspeed"
    " --deepspeed_config ds.json --zero-stage 2 --checkpoint-activations"
)


def test_the_stage_is_that_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE), "utf-8")
    found = import_file(parse(WITH_ENGINE, "run.sh", folder=tmp_path), cluster="dgx-h100:1")
    keys = flatten_job(load_job(found.job))
    assert found.form == "megatron-deepspeed"
    assert (keys["plan.data"], keys["plan.tp"], keys["plan.recompute"]) == ("zero-2", 2, "full")
    with pytest.raises(OpenQuestions, match=r"ds\.json"):
        import_file(
            parse(WITH_ENGINE.replace("ds.json", "no-ds.json"), "run.sh", folder=tmp_path), cluster="dgx-h100:1"
        )
    sequence = WITH_ENGINE.replace("--zero-stage 2", "--zero-stage 2 --ds-sequence-parallel-size 4")
    keys = flatten_job(load_job(import_file(parse(sequence, "run.sh", folder=tmp_path), cluster="dgx-h100:1").job))
    assert (keys["plan.cp"], keys["plan.sequence"]) == (4, "ulysses")


@pytest.mark.parametrize("name", ["ds.json", "./ds_config.$SLURM_JOBID.json"])
def test_a_configuration_that_the_script_writes_is_one_in_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE), "utf-8")
    expected = import_file(parse(WITH_ENGINE, "run.sh", folder=tmp_path), cluster="dgx-h100:1").job
    body = json.dumps({**ENGINE, "train_batch_size": "BATCH"}).replace('"BATCH"', "$BATCH")
    script = f"BATCH=64\nconfig={name}\ncat <<EOT > $config\n{body}\nEOT\n{WITH_ENGINE}\n"
    script = script.replace("ds.json --zero", "${config} --zero")
    assert import_file(parse(script, "run.sh"), cluster="dgx-h100:1").job == expected


def test_experts_that_differ_from_layer_to_layer_are_asked_about(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ENGINE), "utf-8")
    with pytest.raises(OpenQuestions, match="--num-experts"):
        import_file(parse(f"{WITH_ENGINE} --num-experts 32 64", "run.sh", folder=tmp_path), cluster="dgx-h100:1")


# ------------------------------------------------------------------------------------------ scripts

SLURM = (
    "#!/bin/bash\n#SBATCH --nodes=2\n"
    + "".join(f': "${{{name}:={value}}}"\n' for name, value in {"TP": 4, "PP": 2, "MBS": 1, "GBS": 288}.items())
    + "declare -a ARGS=(--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048\n"
    "  --max-position-embeddings 2048 --vocab-size 51200 --tensor-model-parallel-size $TP\n"
    "  --pipeline-model-parallel-size $PP --micro-batch-size $MBS --global-batch-size $GBS)\n"
    "srun --mpi=pmix python -m torch.distributed.run --nproc_per_node 8 --nnodes 2 \\\n"
    '  pretrain_gpt.py "${ARGS[@]}" --bf16\n'
)
POSITIONAL = (
    "ENV=$1\nMODEL_SIZE=$2\nif [ $MODEL_SIZE = 1B ]; then LAYERS=16; elif [ $MODEL_SIZE = 8B ]; then LAYERS=32; fi\n"
    "if [ $ENV = dsw ]; then NNODES=1; GPUS=8; fi\n"
    'options="--num-layers ${LAYERS} --hidden-size 4096 --num-attention-heads 32 --seq-length $5 --vocab-size 32000'
    ' --max-position-embeddings $5 --micro-batch-size $3 --global-batch-size $4 --bf16"\n'
    'options="$options --tensor-model-parallel-size $6 --pipeline-model-parallel-size $7"\n'
    'eval "torchrun --nproc_per_node $GPUS --nnodes $NNODES pretrain_qwen.py $options"\n'
)


def test_defaults_of_a_slurm_script_and_what_a_user_gives_in_their_place() -> None:
    job = read(SLURM, "run.sbatch").job
    assert (job["plan"]["tp"], job["plan"]["pp"], job["batch"]["global"]) == (4, 2, 288)
    assert load_job(job).cluster.gpus == 16
    options = LaunchOptions(environment={"TP": "8", "PP": "1"})
    plan = import_file(parse_launch_text(SLURM, "run.sbatch", ".sbatch", Path(), options)).job["plan"]
    assert plan["tp"] == 8 and plan.get("pp", 1) == 1


def test_arguments_of_a_script_of_pai_megatron_patch() -> None:
    job = read(POSITIONAL, "run.sh", "dsw 8B 1 64 4096 2 2").job
    keys = flatten_job(load_job(job))
    assert (keys["model.layers"], keys["plan.tp"], keys["plan.pp"], keys["batch.global"]) == (32, 2, 2, 64)
    with pytest.raises(OpenQuestions, match=r"--global-batch-size: it is '\$4'"):
        read(POSITIONAL, "run.sh")


def test_arguments_in_a_file_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("PARALLEL='--tensor-model-parallel-size 2 --use-distributed-optimizer'\n", "utf-8")
    script = (
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nsource "$HERE/env.sh"\n'
        f"torchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE} --bf16 $PARALLEL\n"
    )
    (tmp_path / "run.sh").write_text(script, "utf-8")
    plan = import_file(parse(script, str(tmp_path / "run.sh"), folder=tmp_path)).job["plan"]
    assert plan["tp"] == 2 and plan["zero"] == 1


def test_a_script_of_primus_names_its_experiment(tmp_path: Path) -> None:
    experiment = (
        "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n    model: llama3.1_8B.yaml\n"
        "    overrides: {micro_batch_size: 2, global_batch_size: 128, seq_length: 8192,\n"
        "      tensor_model_parallel_size: 2}\n"
    )
    (tmp_path / "exp.yaml").write_text(experiment, "utf-8")
    direct = import_file(parse(experiment, "exp.yaml", folder=tmp_path), cluster="dgx-h100:1").job
    script = parse("EXP=exp.yaml bash ./examples/run_pretrain.sh\n", "run.sh", folder=tmp_path)
    assert import_file(script, cluster="dgx-h100:1").job == direct and direct["plan"]["tp"] == 2


def test_a_test_that_only_reports_an_error_hides_no_launch() -> None:
    guard = 'if [ ! -f "$ENTRY" ]; then\n  echo "Error: pretrain_gpt.py is not here" >&2\n  exit 1\nfi\n'
    launch = f"ENTRY=pretrain_gpt.py\n{guard}torchrun --nproc_per_node 8 $ENTRY {SHAPE} --bf16\n"
    assert load_job(read(launch, "run.sh").job).batch.micro == 1


# ------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--attention-head-type multiquery", "model.kv_heads", 1),
        ("--attention-head-type multihead", "model.kv_heads", 16),
        ("--optimizer hybridadam --optimizer-offload-policy static", "plan.offload", ("optimizer",)),
        ("--optimizer hybridadam --optimizer-offload-fraction 0", "plan.offload", ()),
    ],
)
def test_settings_of_forks(flags: str, key: str, value: Any) -> None:
    assert flatten_job(load_job(import_script(f"{SHAPE} --bf16 {flags}").job)).get(key, ()) == value


@pytest.mark.parametrize(
    ("half", "stage", "data"), [("bf16", 0, "zero-1"), ("fp16", 0, "ddp"), ("bf16", 1, "zero-1"), ("bf16", 2, "zero-2")]
)
def test_without_zero_the_engine_shares_out_the_states_of_bf16(half: str, stage: int, data: str) -> None:
    configuration = json.dumps({"zero_optimization": {"stage": stage}, half: {"enabled": True}})
    script = f"echo '{configuration}' > ds.json\ndeepspeed --include h:0,1@g:2,3 pretrain_gpt.py {SHAPE} --{half}"
    keys = flatten_job(load_job(read(f"{script} --deepspeed --deepspeed_config ds.json", "run.sh").job))
    assert keys["plan.data"] == data
    assert keys["cluster.gpus"] == 4


def test_batches_that_contradict_each_other_are_asked_about() -> None:
    start = f"deepspeed pretrain_gpt.py {SHAPE} --fp16 --deepspeed --deepspeed_config ds.json"
    with pytest.raises(OpenQuestions) as asked:
        read("echo '{\"train_batch_size\": 32}' > ds.json\n" + start, "run.sh", cluster="dgx-h100:1")
    assert [question.answers for question in asked.value.questions] == [("batch.global=64",)]
    assert read("echo '{\"train_batch_size\": 64}' > ds.json\n" + start, "run.sh", cluster="dgx-h100:1").job


def test_names_of_releases_until_2020() -> None:
    old = SHAPE.replace("--micro-batch-size", "--batch-size") + "--fp16 --model-parallel-size 4"
    keys = flatten_job(load_job(import_script(old.replace("--batch-size 1", "--batch-size 2")).job))
    assert (keys["plan.tp"], keys["batch.micro"]) == (4, 2)


@pytest.mark.parametrize(
    ("framework", "overrides", "mode"),
    [
        ("megatron", "lora: {enabled: true, dim: 8, target_modules: [linear_qkv]}", "lora"),
        ("megatron", "lora: {enabled: false, dim: 8}", "full"),
        ("megatron_bridge", "peft: lora\n      dim: 8", "lora"),
        ("megatron_bridge", "peft: none", "full"),
    ],
)
def test_adapters_of_primus(framework: str, overrides: str, mode: str) -> None:
    model = {"megatron": "llama3.1_8B", "megatron_bridge": "qwen3_8b"}[framework]
    text = f"modules:\n  m:\n    framework: {framework}\n    config: sft_trainer.yaml\n    model: {model}.yaml\n"
    text += f"    overrides:\n      micro_batch_size: 1\n      global_batch_size: 32\n      {overrides}\n"
    keys = flatten_job(load_job(read(text, "run.yaml", cluster="dgx-h100:2").job))
    assert keys.get("train.mode", "full") == mode
    assert keys.get("train.rank") == (8 if mode == "lora" else None)


@pytest.mark.parametrize(
    ("flags", "routing"),
    [
        ("--data-path corpus", "natural"),
        ("--data-path corpus --moe-router-enable-expert-bias", "loss-free"),
        ("--data-path corpus --moe-router-force-load-balancing", "balanced"),
        ("--mock-data", "balanced"),
    ],
)
def test_experts_on_data_are_chosen_by_a_trained_router(flags: str, routing: str) -> None:
    """Its step is the longer the less even it is, and no longer where every rank holds all experts."""
    experts = f"{SHAPE} --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear"
    job = load_job(import_script(f"{experts} --expert-model-parallel-size 8 {flags}").job)
    entry = next(entry for entry in job.plan.schemes if entry.use == "expert/all-to-all")
    stated = (entry.model_extra or {}).get("routing", "balanced")
    assert (stated if isinstance(stated, str) else stated["trained"]) == routing
    even = load_job(import_script(f"{experts} --expert-model-parallel-size 8 --mock-data").job)
    steps = [forecast_step(one) for one in (even, job)]
    assert (steps[1].step_time > 1.001 * steps[0].step_time) is (routing != "balanced")
    assert steps[1].peak_allocated == pytest.approx(steps[0].peak_allocated, rel=1e-5)
    assert ("load of the busiest rank" in job.framework.sigmas) is (routing != "balanced")
    whole = load_job(import_script(f"{experts} --expert-model-parallel-size 1 {flags}").job)
    assert not any(scheme.use.startswith("expert/") for scheme in whole.plan.schemes)
    for change in ("plan={ep: 8}", "plan.ep=[1, 8]"):  # ranks that only the user gives them
        imported = import_script(f"{experts} {flags}", change).job
        stated = imported["model"].get("moe", {}).get("routing") or "balanced"
        assert (stated in ("natural", "loss-free")) is (routing != "balanced")


@pytest.mark.parametrize(
    ("kind", "data", "routing"),
    [
        ("pretrain", "", None),
        ("pretrain", "recipe.data = run.Config(PreTrainingDataModule, paths=['corpus'], seq_length=4096)", "natural"),
        ("pretrain", "recipe.data = run.Config(MockDataModule, seq_length=4096)", None),
        ("finetune", "", "natural"),  # on SQuAD
        ("finetune", "recipe.data = run.Config(MockDataModule, seq_length=4096)", None),
    ],
)
def test_a_file_of_nemo_that_names_data_has_a_trained_router(kind: str, data: str, routing: str | None) -> None:
    recipe = f"recipe = llm.mixtral_8x7b.{kind}_recipe()\n{data}\n"
    found = read(f"from nemo.collections import llm\nimport nemo_run as run\n{recipe}", "run.py")
    model = found.job["model"]
    assert (model.get("moe") or {}).get("routing") == routing if isinstance(model, dict) else routing is None


@pytest.mark.parametrize(("data", "routing"), [("data_prefix: [1.0, corpus]", "natural"), ("data_impl: mock", None)])
def test_a_file_of_nemo_1_names_its_data(data: str, routing: str | None) -> None:
    experts = "num_moe_experts: 8, moe_router_topk: 2, expert_model_parallel_size: 8"
    shape = "num_layers: 4, hidden_size: 1024, num_attention_heads: 16, ffn_hidden_size: 4096, encoder_seq_length: 2048"
    text = f"trainer: {{devices: 8, num_nodes: 1, precision: bf16}}\nmodel: {{{shape}, {experts}, data: {{{data}}}}}\n"
    assert read(text, "run.yaml").job["model"]["moe"].get("routing") == routing


def test_an_untuned_recipe_is_told_from_a_tuned_one() -> None:
    """One that nobody tuned rotates queries and keys in many kernels, and its interval is wider."""

    def import_recipe(name: str, more: str = "") -> dict[str, Any]:
        text = f"torchrun --nproc_per_node 8 scripts/training/run_recipe.py --recipe {name} {more}"
        return import_text(text, "file.sh", "megatron-bridge", cluster="dgx-h100:1").job

    untuned = import_recipe("qwen3_8b_sft_4gpu_h100_bf16_config")
    changes = untuned["framework"]["set"]
    assert changes["regime"] == "family" and changes["eager"] == {"rope": {"fused": False}}
    assert untuned["batch"]["documents"] == 200  # of SQuAD
    mixture = import_recipe("qwen3_8b_sft_4gpu_h100_bf16_config", "--dataset tulu3")
    assert mixture["batch"]["documents"] == 370
    fused = {**untuned, "framework": {**untuned["framework"], "set": {}}}
    steps = [forecast_step(load_job(one)).step_time for one in (untuned, fused)]
    assert steps[0] > 1.01 * steps[1]
    assert "eager" not in import_recipe("llama3_8b_sft_2gpu_h100_bf16_config")["framework"].get("set", {})
    tuned = import_recipe("qwen3_30b_a3b_pretrain_8gpu_b200_bf16_config")["framework"]
    assert "regime" not in (tuned if isinstance(tuned, dict) else {}).get("set", {})
