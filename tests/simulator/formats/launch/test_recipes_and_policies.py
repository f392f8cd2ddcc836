"""torchtune, nanotron, verl and NeMo-RL, and the programs that are refused by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.convert import import_file
from meshcast.simulator.formats.launch.detect import detect_program
from meshcast.simulator.formats.launch.imported_job import ImportedJob, OpenQuestions
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, parse_launch_text
from meshcast.simulator.formats.launch.references import fill_references
from meshcast.simulator.formats.launch.table import Keys, Stated
from meshcast.simulator.loading.load import load_job


def import_text(
    text: str, *changes: str, name: str = "run.yaml", folder: Path = Path(), arguments: str = "", assume: bool = False
) -> ImportedJob:
    """The job of a file. arguments: of its command line. assume: what it leaves open."""
    options = LaunchOptions(arguments=tuple(arguments.split()), assume_defaults=assume)
    return import_file(parse_launch_text(text, name, Path(name).suffix, folder, options), changes)


def keys_of(imported: ImportedJob) -> Keys:
    return flatten_job(load_job(imported.job, base=Path()))


# ------------------------------------------------------------------------------------------------------ references


def test_references_lead_to_what_they_name() -> None:
    values = {"a.b": "${..c}", "c": "${d}", "d": 4, "a.e": "${.b}", "f": "x${d}", "g": "${mul:${a.b}, ${d}}"}
    filled = fill_references({name: Stated(value, name) for name, value in values.items()})
    assert {name: stated.value for name, stated in filled.items()} == {
        **{"a.b": 4, "c": 4, "d": 4, "a.e": 4, "f": "x4", "g": 16}
    }


@pytest.mark.parametrize("value", ["${b}", "${nothing}", "${mul:two,3}", "${div:1,0}", "${oc.env:HOME}"])
def test_references_that_lead_nowhere_are_unknown(value: str) -> None:
    assert fill_references({"a": Stated(value, "a"), "b": Stated("${a}", "b")})["a"].unknown


# ------------------------------------------------------------------------------------------------------- torchtune

RECIPE = """\
# tune run {recipe} --config here
model: {{_component_: torchtune.models.llama3_1.{builder}{adapters}}}
tokenizer: {{_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 512}}
batch_size: 2
gradient_accumulation_steps: 4
dtype: bf16
optimizer: {{_component_: torch.optim.AdamW}}
"""


ADAPTERS = ", lora_rank: 4, lora_attn_modules: [q_proj, output_proj]"


def write_recipe(recipe: str, builder: str = "llama3_1_8b") -> str:
    return RECIPE.format(recipe=recipe, builder=builder, adapters=ADAPTERS if "lora" in builder else "")


def tune(recipe: str, builder: str = "llama3_1_8b", more: str = "", **options: Any) -> Keys:
    return keys_of(import_text(write_recipe(recipe, builder) + more, **options))


def test_the_recipe_decides_what_is_sharded() -> None:
    alone = tune("full_finetune_single_device")
    sharded = tune("--nnodes 2 --nproc_per_node 8 full_finetune_distributed")
    assert (alone["plan.data"], alone["cluster.gpus"]) == ("ddp", 1)
    assert (sharded["plan.data"], sharded["cluster.gpus"], sharded["batch.global"]) == ("fsdp", 16, 2 * 4 * 16)
    assert {alone[f"precision.{key}"] for key in ("compute", "gradients", "main_weights", "moments")} == {"bf16"}


def test_a_recipe_that_nothing_names_is_asked_for() -> None:
    with pytest.raises(OpenQuestions, match=r"plan\.fsdp=true"):
        tune("")
    changed = import_text(write_recipe(""), "plan.fsdp=false")
    assert keys_of(changed)["plan.data"] != "fsdp"


def test_builders_say_what_is_trained() -> None:
    adapted = tune("lora_finetune_single_device", "qlora_llama3_1_8b")
    assert (adapted["train.mode"], adapted["train.rank"]) == ("qlora", 4)
    assert adapted["train.targets"] == ["attn_q", "attn_proj"]
    assert adapted["train.frozen_weights"] == "nf4-double"
    assert tune("full_finetune_single_device")["train.mode"] == "full"


@pytest.mark.parametrize(
    ("settings", "recompute"),
    [
        ("enable_activation_checkpointing: true", "full"),
        ("enable_activation_checkpointing: true\nac_mode: full", "none"),  # each is applied without the other alone
        ("ac_mode: full", "full"),
        ("ac_mode: null", "none"),
    ],
)
def test_two_settings_of_checkpointing(settings: str, recompute: str) -> None:
    assert tune("full_finetune_distributed", more=settings)["plan.recompute"] == recompute


def test_a_longest_sequence_is_asked_for_and_overrides_count() -> None:
    assert tune("full_finetune_distributed", arguments="tokenizer.max_seq_len=64")["batch.sequence"] == 64
    with pytest.raises(OpenQuestions, match=r"batch\.sequence"):
        tune("full_finetune_distributed", arguments="tokenizer.max_seq_len=null")


def test_pairs_of_preferences_are_two_sequences() -> None:
    pairs = tune("full_dpo_distributed")
    assert pairs["batch.micro"] == 2 * tune("full_finetune_distributed")["batch.micro"]
    assert pairs["train.reference"] == "model"


def test_generation_inside_the_loop_is_refused() -> None:
    with pytest.raises(PlanError, match="generation inside the training loop"):
        tune("dev/grpo_full_finetune_distributed")


# -------------------------------------------------------------------------------------------------------- nanotron

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
SHAPE |= {"num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}
DEGREES = {"dp": 2, "pp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER"}
TOKENS = {"sequence_length": 256, "train_steps": 15, "micro_batch_size": 2, "batch_accumulation_per_replica": 3}
UPDATE = {"zero_stage": 1, "accumulate_grad_in_fp32": True}


def write_sections(**changes: Any) -> str:
    """The YAML file. changes: of its degrees."""
    model = {"model_config": {"is_llama_config": True, **SHAPE}}
    sections = {"model": model, "parallelism": {**DEGREES, **changes}, "tokens": TOKENS, "optimizer": UPDATE}
    return yaml.safe_dump(sections)


def test_a_python_file_says_what_its_yaml_file_says() -> None:
    def call(name: str, fields: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in fields.items())})"

    python = (
        "from nanotron.config import Config, LlamaConfig, ModelArgs, OptimizerArgs, ParallelismArgs, TokensArgs\n"
        f"shape = {call('LlamaConfig', SHAPE)}\nprint(shape.vocab_size * 2)\n"
        f"config = Config(parallelism={call('ParallelismArgs', DEGREES)}, model=ModelArgs(model_config=shape),\n"
        f"    optimizer={call('OptimizerArgs', UPDATE)}, tokens={call('TokensArgs', TOKENS)})\n"
    )
    keys = keys_of(import_text(write_sections()))
    assert keys == keys_of(import_text(python, name="run.py"))
    assert (keys["plan.data"], keys["plan.pipeline"], keys["plan.tensor"]) == ("zero-1", "gpipe", "megatron-sp")
    assert (keys["cluster.gpus"], keys["batch.global"]) == (8, 2 * 3 * 2)


@pytest.mark.parametrize(("accumulates", "kept"), [(True, "fp32"), (False, "bf16")])
def test_all_but_products_are_kept_as_gradients_are_accumulated(accumulates: bool, kept: str) -> None:
    text = write_sections().replace("in_fp32: true", f"in_fp32: {accumulates}")
    keys = keys_of(import_text(text))
    assert {keys[f"precision.{name}"] for name in ("gradients", "main_weights", "moments")} == {kept}
    assert keys["precision.compute"] == "bf16"


def test_all_degrees_together_are_the_gpus() -> None:
    keys = keys_of(import_text(write_sections(context_parallel_size=2, pp_engine="1f1b", recompute_layer=True)))
    assert (keys["cluster.gpus"], keys["plan.cp"], keys["plan.pipeline"]) == (16, 2, "1f1b")
    assert (keys["plan.recompute"], keys["batch.global"]) == ("full", 2 * 3 * 2)


def test_a_configuration_that_the_script_may_write_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(write_sections())
    start = "torchrun --nproc_per_node 8 run_train.py --config-file small.yaml\n"
    assert keys_of(import_text(start, name="run.sh", folder=tmp_path))["plan.tp"] == 2
    with pytest.raises(OpenQuestions, match=r"small\.py"):
        import_text(f"python small.py\n{start}", name="run.sh", folder=tmp_path)


# --------------------------------------------------------------------------------------------------------- NeMo-RL

POLICY: dict[str, Any] = {
    "policy": {
        **{"model_name": "meta-llama/Llama-3.2-1B", "train_global_batch_size": 32, "train_micro_batch_size": 1},
        **{"max_total_sequence_length": 1024, "precision": "bfloat16"},
        "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1, "dp_replicate_size": 2, "cpu_offload": False},
        "megatron_cfg": {
            **{"enabled": False, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            **{"activation_checkpointing": False, "recompute_granularity": "full"},
            "optimizer": {"use_distributed_optimizer": True, "lr": 1e-5},
            "fp8_cfg": {"enabled": False, "fp8": "e4m3", "fp8_recipe": "blockwise"},
        },
    },
    "cluster": {"num_nodes": 2, "gpus_per_node": 8},
}


def read_policy(tmp_path: Path, changes: str) -> Keys:
    """The job of a file that changes `POLICY`."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(POLICY))
    return keys_of(import_text(f"defaults: base.yaml\n{changes}\n", folder=tmp_path))


def test_a_trainer_that_is_off_changes_nothing(tmp_path: Path) -> None:
    sharded = read_policy(tmp_path, "")
    assert (sharded["plan.data"], sharded["plan.replicate"], sharded["plan.tp"]) == ("fsdp", 2, 1)
    other = "{tensor_model_parallel_size: 8, activation_checkpointing: true, fp8_cfg: {enabled: true}}"
    assert read_policy(tmp_path, f"policy: {{megatron_cfg: {other}}}") == sharded


def test_experts_on_one_rank_each_are_those_of_a_file_that_does_not_divide_them(tmp_path: Path) -> None:
    read_policy(tmp_path, "")
    start = "defaults: base.yaml\npolicy: {dtensor_cfg: {tensor_parallel_size: 2"
    texts = (f"{start}}}}}\n", f"{start}, expert_parallel_size: 1}}}}\n")
    plain, stated = (keys_of(import_text(text, "model=qwen3-30b-a3b", folder=tmp_path)) for text in texts)
    assert plain == stated


def test_switches_of_megatron_decide_what_is_said_below_them(tmp_path: Path) -> None:
    on = "dtensor_cfg: {enabled: false, tensor_parallel_size: 8}, megatron_cfg: {enabled: true"
    plain = read_policy(tmp_path, f"policy: {{{on}}}}}")
    assert (plain["plan.data"], plain["plan.tp"], plain["plan.pp"]) == ("zero-1", 2, 2)
    assert (plain["plan.recompute"], plain["precision.compute"]) == ("none", "bf16")
    full = read_policy(tmp_path, f"policy: {{{on}, activation_checkpointing: true, fp8_cfg: {{enabled: true}}}}}}")
    assert (full["plan.recompute"], full["precision.compute"]) == ("full", "fp8-blockwise")


def test_a_start_is_known_by_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(POLICY))
    start = "uv run examples/run_sft.py --config base.yaml cluster.num_nodes=1\n"
    keys = keys_of(import_text(start, name="run.sh", folder=tmp_path))
    assert (keys["cluster.gpus"], keys["batch.global"]) == (8, 32)


def test_a_null_ends_a_section_of_the_file_below(tmp_path: Path) -> None:
    on = "dtensor_cfg: null, megatron_cfg: {enabled: true, optimizer: null}"
    assert read_policy(tmp_path, f"policy: {{{on}}}")["plan.data"] == "ddp"


def test_a_file_below_that_is_missing_is_asked_for() -> None:
    with pytest.raises(OpenQuestions, match=r"elsewhere\.yaml"):
        import_text("defaults: elsewhere.yaml\npolicy: {train_global_batch_size: 8, dtensor_cfg: {enabled: true}}\n")


def test_a_rollout_is_asked_about(tmp_path: Path) -> None:
    changes = "grpo: {num_prompts_per_step: 4}\npolicy: {generation: {backend: vllm}}"
    with pytest.raises(OpenQuestions, match="vllm"):
        read_policy(tmp_path, changes)
    text = f"defaults: base.yaml\n{changes}\n"
    assert keys_of(import_text(text, "train.mode=full", folder=tmp_path)) == read_policy(tmp_path, "")


# ------------------------------------------------------------------------------------------------------------ verl

TUNING = "torchrun --nproc_per_node=$1 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B ${@:2}\n"

ACTOR = "actor_rollout_ref.actor"


def test_overrides_of_a_command_and_the_defaults_of_its_trainer() -> None:
    plain = keys_of(import_text(TUNING, name="run.sh", arguments="4"))
    assert (plain["batch.global"], plain["batch.micro"], plain["batch.sequence"]) == (256, 4, 1024)
    assert (plain["plan.data"], plain["plan.recompute"], plain["cluster.gpus"]) == ("fsdp", "full", 4)
    arguments = "4 data.max_length=512 ulysses_sequence_parallel_size=2 model.lora_rank=8"
    changed = keys_of(import_text(TUNING, name="run.sh", arguments=arguments))
    assert (changed["batch.sequence"], changed["plan.cp"], changed["train.rank"]) == (512, 2, 8)


def update(*words: str, **options: Any) -> ImportedJob:
    """The job of an update of an actor. words: overrides."""
    model = "actor_rollout_ref.model.path=$MODELS/Qwen3-8B"
    start = f"python3 -m verl.trainer.main_ppo {model} {ACTOR}.ppo_micro_batch_size_per_gpu=2 {' '.join(words)}\n"
    return import_text(start, "train.mode=full", name="run.sh", **options)


def test_an_update_counts_the_answers_of_its_prompts() -> None:
    lengths = "data.max_prompt_length=256", "data.max_response_length=768"
    keys = keys_of(update(f"{ACTOR}.ppo_mini_batch_size=64", "actor_rollout_ref.rollout.n=4", *lengths))
    assert (keys["batch.global"], keys["batch.micro"], keys["batch.sequence"]) == (256, 2, 1024)


def test_what_is_moved_for_the_rollout_is_there_for_the_update() -> None:
    moved = update(f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.optimizer_offload=True")
    assert keys_of(moved) == keys_of(update())
    assert {entry.shown.rpartition(".")[2] for entry in moved.findings.approximated} >= {
        *("param_offload", "optimizer_offload")
    }
    stays = keys_of(update(f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.offload_policy=True"))
    assert stays["plan.data.offload"]


def test_degrees_of_the_rollout_and_of_the_reference_are_not_those_of_the_actor() -> None:
    words = [f"actor_rollout_ref.{part}.megatron.tensor_model_parallel_size=8" for part in ("ref", "rollout")]
    actor = f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2"
    keys = keys_of(update(*actor, *words))
    assert (keys["plan.tp"], keys["plan.data"], keys["plan.tensor"]) == (2, "zero-1", "megatron-sp")


# --------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("a.yml", '{"pipe_parallel_size": 1, "num_layers": 2}', "GPT-NeoX"),
        ("a.sh", "python ./deepy.py train.py 6B.yml", "GPT-NeoX"),
        ("a.yaml", "out_dir: out\ndata: Alpaca\ntrain: {micro_batch_size: 1}", "LitGPT"),
        ("a.py", "from olmo_core.train import prepare", "OLMo-core"),
        ("a.sh", "colossalai run --nproc_per_node 8 train.py -g", "ColossalAI"),
        ("a.sh", "exit 1\ncolossalai run --nproc_per_node 8 train.py -g", "ColossalAI"),
        ("a.sh", "deepspeed --module openrlhf.cli.train_sft --train_batch_size 8", "OpenRLHF"),
        ("a.sh", "python3 train.py --actor-num-nodes 1 --rollout-batch-size 8 --num-layers 4 --seq-length 8", "slime"),
        ("a.json", '{"distributed": {"tp_size": 1}, "training": {"micro_batch_size": 1}}', "picotron"),
        ("a.sh", "composer train.py mpt.yaml", "LLM Foundry"),
        ("a.yaml", "train_loader: {name: text}\nmax_duration: 1ep\nmodel: {d_model: 4}", "LLM Foundry"),
        ("a.yaml", "max_duration: 1ep\nmodel: {d_model: 4}", "OLMo"),
        ("a.sh", "python3 -m MaxText.train base.yml run_name=a", "MaxText"),
        ("a.sh", "python -m EasyLM.models.llama.llama_train --mesh_dim=1,8,1", "EasyLM"),
        ("a.sh", "fairseq-train data --arch transformer", "fairseq"),
        ("a.sh", "deepspeed main.py --actor_model_name_or_path a --critic_model_name_or_path b", "DeepSpeed-Chat"),
        ("a.sh", "torchrun own_train.py --hidden_width 8 --num_layers 4", "it starts own_train.py"),
    ],
)
def test_programs_that_are_not_read_are_refused_by_name(name: str, text: str, program: str) -> None:
    with pytest.raises(PlanError, match=program):
        detect_program(parse_launch_text(f"{text}\n", name, Path(name).suffix))


def test_a_configuration_that_a_command_names_says_its_program(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{"distributed": {"tp_size": 1}, "training": {"micro_batch_size": 1}}')
    with pytest.raises(PlanError, match="picotron"):
        detect_program(parse_launch_text("torchrun train.py --config small.json\n", "a.sh", ".sh", tmp_path))
