"""Small files that state what the files of published runs state are read as those runs."""

from __future__ import annotations

from typing import Any

from meshcast.simulator.formats.launch.convert import import_text
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions
from meshcast.simulator.loading.load import load_job

NEMO_1 = """\
trainer: {precision: bf16, devices: 8, num_nodes: 2, max_steps: 50}
model:
  num_layers: 30
  hidden_size: 8192
  num_attention_heads: 64
  micro_batch_size: 1
  global_batch_size: 64
  encoder_seq_length: 4096
  tokenizer: {library: huggingface, type: meta-llama/Meta-Llama-3-70B}
  fp8: false
  fp8_hybrid: true
  optim: {name: distributed_fused_adam, grad_sync_dtype: bf16}
"""

WORKLOADS = """\
from dataclasses import replace
from utils.utils import WorkloadBaseConfig
BASE = WorkloadBaseConfig(num_gpus=16, global_batch_size=64, tensor_model_parallel_size=2)
LLAMA3_70B_PRETRAIN_CONFIG_H100_FP8_CS_V1 = replace(BASE, pipeline_model_parallel_size=4, recompute_num_layers=3)
QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_BF16_V1 = replace(
    BASE, expert_model_parallel_size=8, moe_flex_dispatcher_backend="hybridep", recompute_modules=["moe_act"]
)
"""

RECIPE = """\
from megatron.bridge.perf_recipes.llama.common import _perf_precision, _shared, llama3_70b_pretrain_config
def llama3_70b_pretrain_64gpu_gb200_fp8cs_config():
    cfg = llama3_70b_pretrain_config()
    cfg.mixed_precision = _perf_precision("fp8_cs")
    cfg.train.micro_batch_size = 1
    _shared(cfg)
    return cfg
"""

ENGINE = """\
cat <<EOT > ds.json
{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}
EOT
torchrun --nproc_per_node 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --zero-stage 0 --bf16 \\
  --num-layers 14 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \\
  --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 4 \\
  --pp-partition-method 'type:transformer|embedding'
"""


def read(text: str, name: str, form: str, recipe: str = "") -> dict[str, Any]:
    """The keys of the job that a text states."""
    options = LaunchOptions(arguments=("--recipe", recipe) if recipe else ())
    return flatten_job(load_job(import_text(text, name, form, cluster="dgx-h100:8", options=options).job))


def test_yaml_of_nemo_1_says_its_gradients_its_loss_and_by_its_tokenizer_the_vocabulary() -> None:
    keys = read(NEMO_1, "train.yaml", "nemo")
    assert keys["precision.gradients"] == "bf16" and keys["precision.compute"] == "bf16"
    assert keys["model.vocab"] == 128256
    fused = read(NEMO_1 + "  cross_entropy_loss_fusion: true\n", "train.yaml", "nemo")
    assert keys["framework.set.loss.forward"] > fused["framework.set.loss.forward"]


def test_a_constant_of_megatron_bridge_changes_the_recipe_that_it_is_named_after() -> None:
    dense = read(WORKLOADS, "base.py", "megatron-bridge", "LLAMA3_70B_PRETRAIN_CONFIG_H100_FP8_CS_V1")
    assert (dense["plan.pp"], dense["plan.tp"], dense["batch.global"]) == (4, 2, 64)
    assert (dense["plan.recompute"], dense["precision.compute"]) == ("full", "fp8-tensorwise")
    sparse = read(WORKLOADS, "base.py", "megatron-bridge", "QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_BF16_V1")
    assert (sparse["plan.ep"], sparse["plan.expert"], sparse["plan.recompute"]) == (8, "hybrid-ep", "selective")


def test_a_function_that_is_a_recipe_of_the_library_needs_no_code_from_elsewhere() -> None:
    keys = read(RECIPE, "llama3.py", "megatron-bridge", "llama3_70b_pretrain_64gpu_gb200_fp8cs_config")
    assert (keys["batch.micro"], keys["batch.global"], keys["precision.compute"]) == (1, 256, "fp8-tensorwise")


def test_bf16_without_a_stage_of_zero_shards_states_and_the_ends_count_as_layers() -> None:
    keys = read(ENGINE, "run.sh", "megatron-deepspeed")
    assert (keys["plan.data"], keys["plan.partition"]) == ("zero-1", "ends-as-layers")
