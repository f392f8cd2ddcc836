"""Megatron-LM: the arguments of ``pretrain_gpt.py`` in a shell script, in a list, or as ``MODEL_ARGS`` of its tests.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/training/arguments.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml
from meshcast.simulator.formats.launch.arguments import merge_settings
from meshcast.simulator.formats.launch.keys import drop_inactive
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.program import DemandedVariable, Evidence, LaunchFormat
from meshcast.simulator.formats.launch.programs.megatron_model import (
    COMMAND_LINE,
    EXPERTS,
    LATENT,
    MAMBA,
    SHAPE,
    omit_derived,
    read_shape,
    write_shape,
)
from meshcast.simulator.formats.launch.programs.megatron_plan import (
    DEGREES,
    TRAITS,
    read_plan,
    read_recipe,
    write_plan,
    write_recipe,
)
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import OFF, UNSTATED, Keys, SettingRow, Stated, write_rows
from meshcast.simulator.formats.launch.verdicts import Approximation, NoInfluence, Verdicts

OWN = (
    SettingRow("no_gradient_accumulation_fusion", "framework.set.fused_gradients", "switch", OFF, silent=True),
    SettingRow(
        "attention_backend",
        "framework.set.attention",
        "text",
        {"flash": "flash", "unfused": "unfused", "local": "unfused", "fused": "flash", "auto": "flash"},
        silent="flash",
    ),
    SettingRow("main_params_dtype", "precision.main_weights", "text", {"fp32": "fp32", "fp16": "fp16"}, silent="fp32"),
    SettingRow(
        "exp_avg_dtype", "precision.moments", "text", {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}, silent="fp32"
    ),
    SettingRow("no_overlap_p2p_communication", "framework.set.overlap.pp", "switch", OFF, silent=True),
)
"""Settings whose names only the command line has."""

FORMAT_NAMES = {"qkv_bias": "add_qkv_bias", "layernorm1p": "apply_layernorm_1p"}

WITHOUT_INFLUENCE = (
    r"log_.*|.*_log_.*|logging_.*|timing_.*|tensorboard.*|wandb.*|one_logger.*|no_one_logger|save.*|load.*|no_load.*|no_save.*"
    r"|ckpt.*|no_ckpt.*|dist_ckpt.*|async_.*|auto_detect_ckpt.*|use_.*ckpt.*|use_checkpoint.*|finetune|exit_.*|checkpoint_.*"
    r"|lr|lr_.*|min_lr|decoupled.*|weight_decay.*|start_weight_decay|end_weight_decay|adam_.*|clip_grad|init_method_.*|seed"
    r"|split|data_.*|train_data.*|valid_.*|test_.*|vocab_file|merge_file|tokenizer.*|tiktoken.*|num_workers|mock_data|fim_.*"
    r"|dataloader.*|no_mmap.*|no_create_attention.*|reset_position_ids|eod_.*|create_attention.*|num_dataset.*|no_use_tokenizer.*"
    r"|eval_.*|skip_train|override_opt.*|use_mcore_models|distributed_backend|distributed_timeout.*|rotary_base|rotary_scaling.*"
    r"|rotary_seq.*|rotary_inter.*|use_rope_scaling|rope_.*|mscale.*|norm_epsilon|attention_softmax_in_fp32|group_query_attention"
    r"|apply_query_key.*|bias_.*fusion|squared_relu|calculate_per_token.*"
    r"|moe_aux.*|moe_z_loss.*|moe_router_load.*|moe_router_score.*|moe_router_topk_.*|moe_router_num_groups|moe_router_group.*"
    r"|moe_router_pre.*|moe_router_bias.*|moe_router_dtype|moe_per_layer.*|moe_grouped_gemm|moe_token_drop_policy|mtp_loss.*|glu_linear.*|activation_func_clamp.*"
    r"|master_.*|node_rank|rdzv.*|max_restarts|local_ranks.*|tee|log_dir|role|manual_gc.*|empty_unused.*|check_.*|no_check_.*"
    r"|rerun_.*|error_injection.*|straggler.*|profile.*|use_pytorch_profiler|nvtx_.*|test_mode|disable_gloo.*"
    r"|ddp_average.*|no_gradient_reduce_div.*|cross_entropy_fusion_impl|te_rng_tracker|inference_.*|ckpt_convert.*|num_tokens_to_.*"
    r"|model_provider|apply_wd.*|verify_integrity|async_strategy|yarn_.*|no_yarn.*|bf16|fp8_amax.*|fp8_interval|fp8_margin"
    r"|use_distributed_.*|train_samples|no_record.*|no_initialization|use_cpu_initialization|no_weight_decay.*|sbatch_.*"
    r"|override_.*|dataset.*|return_log.*|top_k|top_p|temperature|prompts?|max_tokens_to_oom|.*random_.*"
)

REASONS = {
    "deterministic_mode": "deterministic kernels are forecast as the usual ones",
    "no_masked_softmax_fusion|no_bias_.*fusion|no_rope_fusion|no_persist.*": "kernels are fused as in the profile",
    "spec": "a specification of modules is code; the usual ones are forecast",
    "optimizer_offload_fraction": "all states of the optimizer are offloaded",
    "reset_attention_mask": "attention is over whole sequences: state batch.documents",
    "step_batch_size_schedule|rampup_batch_size": "the forecast is of a step with the full global batch",
    "experimental_attention_variant|linear_.*|dsa_.*|attention_output_gate": "full attention is forecast",
    "optimizer|muon_.*": "Adam is the only optimizer so far",
    "first_last_layers_bf16|num_layers_at_.*_in_bf16": "all layers are forecast in the format of the recipe",
    "offload_modules|activation_offload_fraction": "activations are offloaded as a whole",
    "cross_entropy_loss_fusion": "the loss has the kernels of the framework's profile",
    "delay_wgrad_compute": "weight gradients are not moved behind other passes",
    "defer_embedding_wgrad_compute|wgrad_deferral_limit": "weight gradients of the output layer are not deferred",
    "moe_shared_expert_overlap": "shared experts are computed in turn with the token dispatch",
    "moe_shared_expert_gate": "the gate of shared experts is left out",
    "moe_permute_fusion|moe_router_fusion|no_moe_.*": "routing and permutation have the kernels of the profile",
    "overlap_p2p_communication_warmup_flush": "messages of warm-up and flush overlap as those between",
    "overlap_param_gather_with_optimizer_step": "weights are gathered behind the whole update",
    "ddp_num_buckets|ddp_bucket_size": "buckets have the size of the framework's profile",
    "fp8_param_gather|fp4_param_gather|fp8_param": "weights are gathered in 16 bits",
    "outer_dp_sharding_strategy|megatron_fsdp_.*|use_nccl_ub|nccl_ub|fsdp_.*": "data/fsdp has its defaults",
    "tp_comm_overlap_.*|tp_comm_.*": "tensor overlap is forecast with its defaults",
    "perform_rl_step|rl_.*|grpo_.*|langrl.*": "a step of pre-training is forecast",
    "export_.*|flextron|.*_int_list|budget_.*": "distillation and elastic training are not described",
    "enable_cuda_graph|cuda_graph_.*|external_cuda_graph": "see cuda_graph_impl",
}


VERDICTS: Verdicts = {
    **{pattern: Approximation(why) for pattern, why in REASONS.items()},
    WITHOUT_INFLUENCE: NoInfluence("it changes neither time nor memory"),
}


def read(file: LaunchFile) -> dict[str, Stated]:
    """The arguments of a script or list, or the ``MODEL_ARGS`` of a YAML file of Megatron's functional tests."""
    text, where = file.text, file.where
    if "MODEL_ARGS" in file.keys:
        found = {}
        for number, line in enumerate(text.splitlines(), 1):  # these files state some flags twice; the last one counts
            given = re.fullmatch(r"\s+(--[\w-]+|[\w-]+(?:\.[\w-]+)+):\s*(.*?)(?:\s+#.*)?", line)
            if given:
                value = read_yaml(given[2] or "null", where, PlanError).data
                found[given[1].lstrip("-").replace("-", "_")] = Stated(value, given[1], f"{where}:{number}")
        return found
    return merge_settings(file.launch) if file.launch is not None else {}


def read_variable(file: LaunchFile, name: str) -> Stated | None:
    """A variable that a script sets, or the ``ENV_VARS`` of a file of Megatron's functional tests."""
    text, where = file.text, file.where
    if "MODEL_ARGS" not in file.keys:
        words = file.run.variables.get(name, ()) if file.run is not None else ()
        known = len(words) == 1 and not words[0].unknown
        return Stated(words[0].text, name, f"{where}:{words[0].line}") if known else None
    found = re.search(rf"^\s+{name}:\s*['\"]?(\w+)", text, re.MULTILINE)
    return Stated(found[1], name, f"{where}:{text.count(chr(10), 0, found.start(1)) + 1}") if found else None


def interpret(reading: Reading) -> None:
    """Fills the keys of a job."""
    reading.read_rows((*DEGREES, *TRAITS, *OWN))
    keys = reading.keys
    read_shape(reading, COMMAND_LINE)
    read_plan(reading)
    if reading.take_switch("use_flash_attn"):
        reading.set_key("framework.set.attention", "flash", "use_flash_attn")
    if reading.take_word("attention_backend") == "fused":
        reading.set_key("framework.set.attention_library", "cudnn", "attention_backend")
    if (kernels := reading.take_word("transformer_impl")) not in ("", "transformer_engine"):
        why = f"kernels of {kernels!r} are forecast as if they were those of Transformer Engine"
        reading.approximate(reading.take("transformer_impl"), why)
    _read_precision(reading)
    _read_graphs(reading)
    read_gpus(reading, "nnodes", "nproc_per_node")
    if (samples := reading.take_count("train_samples")) and "batch.global" in keys and "run.steps" not in keys:
        reading.set_key("run.steps", max(1, samples // keys["batch.global"]), "train_samples")
    reading.set_checkpoints(reading.take_count("save_interval"), reading.take_switch("async_save"), "save_interval")


def read_gpus(reading: Reading, nodes: str, each: str) -> None:
    """The number of GPUs, from the arguments of the launcher or those of the resource manager."""
    count = next((found for name in (nodes, "sbatch_nodes") if (found := _count(reading, name))), None)
    width = next(
        (
            found
            for name in (each, "sbatch_gpus_per_node", "sbatch_ntasks_per_node")
            if (found := _count(reading, name))
        ),
        None,
    )
    if width:
        reading.set_key("cluster.gpus", (count or 1) * width, each)


def _count(reading: Reading, name: str) -> int | None:
    """A number of nodes or GPUs, if the file states one: an unknown variable is none."""
    stated = reading.take(name)
    digits = re.search(r"(\d+)$", str(stated.value)) if stated is not None else None
    return int(digits[1]) if digits and not re.search(r"[$]", str(stated.value if stated else "")) else None


def _read_precision(reading: Reading) -> None:
    half = "bf16" if reading.take_switch("bf16") else "fp16" if reading.take_switch("fp16") else "fp32"
    read_recipe(reading, half)
    in_fp32 = reading.take_switch("accumulate_allreduce_grads_in_fp32")
    in_bf16 = reading.take_switch("grad_reduce_in_bf16")
    main = reading.take_word("main_grads_dtype") or "fp32"
    low = main != "fp32" or in_bf16 or (half == "fp16" and not in_fp32)
    names = ("grad_reduce_in_bf16", "main_grads_dtype", "accumulate_allreduce_grads_in_fp32")
    reading.set_key("precision.gradients", half if low and half != "fp32" else "fp32", *names)
    if not reading.take_switch("use_precision_aware_optimizer"):
        for key in ("precision.main_weights", "precision.moments"):
            reading.set_key(key, "fp32")


def _read_graphs(reading: Reading) -> None:
    """CUDA graphs: of the whole step, or of all but the experts."""
    kind = reading.take_word("cuda_graph_impl")
    on = (
        (kind not in ("", "none"))
        or reading.take_switch("enable_cuda_graph")
        or reading.take_switch("external_cuda_graph")
    )
    scope = reading.take("cuda_graph_modules", "cuda_graph_scope")
    experts = "model.moe.experts" in reading.keys
    reading.set_key(
        "framework.set.cuda_graphs",
        ("outside-experts" if experts and scope is not None else True) if on else False,
        "cuda_graph_impl",
        "enable_cuda_graph",
        "external_cuda_graph",
    )


BENCHMARK = "--mock-data --tokenizer-type NullTokenizer --lr 1e-4"
"""What Megatron-LM does not start without, and no job states."""


def write(keys: Keys, header: list[str]) -> str:
    """A script that starts the run with torchrun."""
    settings = write_settings(keys)
    gpus = keys["cluster.gpus"]
    each = min(gpus, keys.get("cluster.gpus_per_node", 8))
    lines = ["#!/bin/bash", *(f"# {line}".rstrip() for line in header), ""]
    for one in demand_variables(keys):
        lines.append(f"export {one.name}={one.value}" if one.value is not None else f"unset {one.name}")
    lines += [""] if len(lines) > len(header) + 2 else []
    lines += [f"NNODES=${{NNODES:-{-(-gpus // each)}}}", f"GPUS_PER_NODE={each}", "", "ARGS=("]
    lines += [f"    {write_flag(name, value)}" for name, value in settings.items()]
    lines += [")", "", "torchrun --nnodes $NNODES --nproc-per-node $GPUS_PER_NODE \\"]
    lines += [
        "    --master-addr ${MASTER_ADDR:-localhost} --master-port ${MASTER_PORT:-29500} --node-rank ${NODE_RANK:-0} \\"
    ]
    lines += [f'    pretrain_gpt.py "${{ARGS[@]}}" {BENCHMARK} "$@"']
    return "\n".join(lines) + "\n"


def demand_variables(keys: Mapping[str, Any]) -> tuple[DemandedVariable, ...]:
    """The number of hardware queues: one before Blackwell, so that kernels start in the order in which the layers of tp
    and cp issue them; with FSDP, whose collectives must not wait for kernels, never one."""
    if keys.get("plan.data") in ("zero-2", "fsdp"):  # which `write_plan` says as Megatron FSDP
        return (DemandedVariable("CUDA_DEVICE_MAX_CONNECTIONS", refused="1"),)
    parallel = keys.get("plan.tp", 1) > 1 or keys.get("plan.cp", 1) > 1
    if parallel and keys.get("cluster.architecture") != "blackwell" and not keys.get("plan.pipeline.overlap_passes"):
        return (DemandedVariable("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)
    return ()


def remark(keys: Mapping[str, Any]) -> list[str]:
    """What a script is, and what of a run is not in it."""
    lines = [
        f"It is a benchmark script: learning rate and data are not in a job, and are {BENCHMARK}.",
        "To change your own script use meshcast export JOB --against SCRIPT, which prints the settings to edit.",
    ]
    if not keys.get("run.steps"):
        lines.append("The job has no length in steps: run the script with --train-iters 50, for example.")
    if keys.get("model.positions") == "rope":
        lines.append("--rotary-base is not in a job either: here it is the default of Megatron-LM, 10,000.")
    return lines


def write_flag(name: str, value: Any) -> str:
    """A flag with its value, quoted where the shell would divide it."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    if isinstance(value, list | tuple):
        return " ".join([flag, *map(str, value)])
    text = str(value)
    return f"{flag} {text}" if re.fullmatch(r"[\w.,+-]+", text) else f"{flag} '{text}'"


def write_settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a job, by their names with ``_``."""
    keys = drop_inactive(omit_derived(dict(keys)))
    parts = [*SHAPE, *COMMAND_LINE, *DEGREES, *TRAITS, *OWN]
    if "model.moe.experts" in keys:
        parts += EXPERTS
    if "model.mla.kv_lora_rank" in keys:
        parts += LATENT
    if "model.ssm.pattern" in keys:
        parts += MAMBA
    settings = {name: value for name, value in write_rows(parts, keys).items() if value is not False}
    if "num_query_groups" in settings:
        settings["group_query_attention"] = True
    if keys.get("model.dropout", UNSTATED) != 0.1:
        settings["attention_dropout"] = keys.get("model.dropout", 0.1)
    settings |= write_shape(keys, FORMAT_NAMES)
    plan = write_plan(keys)
    if "virtual_pipeline_model_parallel_size" in plan:
        plan["num_virtual_stages_per_pipeline_rank"] = plan.pop("virtual_pipeline_model_parallel_size")
    settings |= plan
    if "use_megatron_fsdp" in settings:
        settings["ckpt_format"] = "fsdp_dtensor"
    if keys.get("plan.data") == "ddp" or "overlap_grad_reduce" not in settings:  # which Megatron-LM refuses
        settings.pop("overlap_param_gather", None)
    if "sequence_parallel" not in settings:
        settings.pop("tp_comm_overlap", None)
    settings |= _write_precision(keys)
    if settings.keys() & {"main_params_dtype", "exp_avg_dtype", "optimizer_cpu_offload"}:
        settings["use_precision_aware_optimizer"] = True
        if "exp_avg_dtype" in settings:
            settings["exp_avg_sq_dtype"] = settings["exp_avg_dtype"]
    return settings | _write_kernels(keys)


def _write_precision(keys: Mapping[str, Any]) -> dict[str, Any]:
    half, recipe = write_recipe(keys, "fp8_format")
    settings = {**({half: True} if half != "fp32" else {}), **recipe}
    gradients = keys.get("precision.gradients")
    if half == "fp16" and gradients == "fp32":
        settings["accumulate_allreduce_grads_in_fp32"] = True
    elif half == "bf16" and gradients == "bf16":
        settings["grad_reduce_in_bf16"] = True
    return settings


def _write_kernels(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of attention kernels and CUDA graphs."""
    settings: dict[str, Any] = {}
    if keys.get("framework.set.attention_library") == "cudnn" and keys.get("framework.set.attention") == "flash":
        settings["attention_backend"] = "fused"
    if graphs := keys.get("framework.set.cuda_graphs"):
        settings |= {"cuda_graph_impl": "transformer_engine" if graphs == "outside-experts" else "full_iteration"}
        if graphs == "outside-experts":
            settings["cuda_graph_modules"] = ["attn", "moe_router", "moe_preprocess"]
    return settings


def recognise(file: LaunchFile) -> Evidence:
    """Arguments that Megatron-LM alone has, or a file of its functional tests."""
    if "MODEL_ARGS" in file.keys:
        return Evidence.CERTAIN
    return Evidence.POSSIBLE if file.launch is not None else Evidence.NONE


MEGATRON = LaunchFormat(
    "megatron",
    "Megatron-LM",
    ".sh",
    recognise,
    read,
    interpret,
    write,
    VERDICTS,
    demand_variables,
    read_variable,
    remark,
)
