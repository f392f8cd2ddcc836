"""What becomes of the settings of Hugging Face's programs that do not state a key of a job.

Sources: huggingface/transformers v4.57.3 and v5.24.0, src/transformers/training_args.py; huggingface/accelerate
v1.15.0, src/accelerate/commands/launch.py and utils/dataclasses.py; deepspeedai/DeepSpeed v0.19.8,
deepspeed/runtime/config.py, runtime/zero/config.py and runtime/zero/offload_config.py.
"""

from __future__ import annotations

import re

from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdict

OPTIMISATION = NoInfluence("it changes the values of the update, not its kernels")
NAMES = NoInfluence("names, paths and logs")
DATA = NoInfluence("the forecast assumes that batches arrive in time")
EVALUATION = NoInfluence("evaluation lies between steps; run.evaluation.micro forecasts its memory")
SAVING = NoInfluence("what a checkpoint holds; a step has none")
START = NoInfluence("how processes start and find each other")
LOADING = NoInfluence("how weights are loaded before the first step")
UNITS = NoInfluence("which layers are units of sharding; layers are forecast")
LENGTH = NoInfluence("the data set decides how many steps a run has")
PADDING = Approximation("sequences are forecast in full length, each alone", "the step of shorter ones is shorter")
LITTLE = "the step errs by little"
LONG = "the forecast is too slow"
SHORT = "the forecast is too fast"
EITHER = "the forecast errs either way"


def list_verdicts(*rows: tuple[str, Verdict]) -> dict[str, Verdict]:
    """Verdicts by names. rows: names with spaces between them, ``*`` for any letters, and what holds for them."""
    return {
        "|".join(re.escape(name).replace(r"\*", ".*") for name in names.split()): verdict for names, verdict in rows
    }


CPU = Decision("it trains on CPUs: name a cluster of them", ("cluster=cpu-core",))

TRAINER_VERDICTS = list_verdicts(
    (
        "learning_rate lr lr_* *_lr warmup* weight_decay adam_* max_grad_norm optim_args min_lr* num_cycles",
        OPTIMISATION,
    ),
    ("neftune_noise_alpha router_aux_loss_coef optim_target_modules embedding_lr* loss_weights", OPTIMISATION),
    (
        "output_dir overwrite_output_dir run_name logging* log_* report_to* hub_* push_to_hub* disable_tqdm project*",
        NAMES,
    ),
    ("trackio* wandb* swanlab* tensorboard* debug skip_memory_metrics include_* plot_* cache_dir token", NAMES),
    ("use_auth_token verbose exp_name experiment* tag tags mlflow* comet* version tracker* profile_* name", NAMES),
    ("dataset dataset_* datasets* data_path data_file* data_dir* data_args* data_cache* data_name data_seed", DATA),
    ("dataloader* train_file train_data* train_dataset* validation_* test_file val_* preprocessing* streaming", DATA),
    ("remove_unused* label_names tokenizer* use_fast_tokenizer chat_template* shuffle* num_workers num_proc", DATA),
    ("lazy_preprocess max_train_samples max_eval_samples max_predict_samples image_folder image_aspect_ratio", DATA),
    ("image_grid_pinpoints text_column* keep_linebreaks columns eos_token pad_token special_tokens*", DATA),
    (
        "ignore_pad_token* overwrite_cache prompt_* instruction* response_* mask_* train_on_* train_sampling_strategy",
        DATA,
    ),
    (
        "interleave* mix_strategy conv_template is_multimodal assistant_only_loss completion_only_loss padding_side",
        DATA,
    ),
    (
        "do_train do_eval do_predict do_test* eval* per_device_eval* per_gpu_eval* predict* prediction_loss_only",
        EVALUATION,
    ),
    ("metric* greater_is_better batch_eval_metrics fp16_full_eval bf16_full_eval", EVALUATION),
    ("generation_* generate_* early_stopping* use_legacy_prediction_loop past_index compute_*", EVALUATION),
    ("save_* load_best* resume* ignore_data_skip restore_callback* auto_resume* enable_jit_checkpoint", SAVING),
    ("seed ddp_timeout ddp_backend ddp_broadcast_buffers ddp_static_graph ddp_find_unused_parameters", START),
    ("local_rank ray_* use_mps_device average_tokens_across_devices dispatch_batches torchdynamo jit_mode_eval", START),
    ("trust_remote_code low_cpu_mem_usage config_name config_overrides use_safetensors *revision resize_*", LOADING),
    ("add_tokens model_type type_of_model model_init_kwargs* use_cache ds3_gather*", LOADING),
    ("lora_alpha peft_lora_alpha lora_dropout lora_bias lora_weight_path lora_task_type use_rslora", OPTIMISATION),
    ("data_split data_output_path lora_module_name only_optimize_lora lora_learning_rate print_loss", DATA),
    ("packing eval_packing group_texts block_diag*", DATA),
    (
        "modules_to_save lora_modules_to_save",
        Approximation("whole modules that are trained beside adapters are left out", "the forecast needs less memory"),
    ),
    ("fsdp_transformer_layer* fsdp_min_num_params", UNITS),
    ("num_train_epochs num_epochs epochs max_train_steps", LENGTH),
    ("group_by_length length_column_name pad_to_* dynamic_padding sequence_bucketing", PADDING),
    (
        "label_smoothing_factor",
        Approximation("further passes over the logits are left out", "the forecast needs less memory, by their copies"),
    ),
    (
        "torch_empty_cache_steps gc_steps gc_collect_steps",
        Approximation("the allocator keeps its blocks between steps in the forecast", SHORT),
    ),
    ("full_determinism", Approximation("the usual kernels are forecast", SHORT)),
    ("half_precision_backend fp16_backend fp16_opt_level", Approximation("PyTorch's autocast is forecast", LITTLE)),
    (
        "use_liger_kernel liger_kernel_config* use_liger",
        Approximation(
            "kernels of Liger are forecast as those of transformers",
            "the forecast is too slow, and needs more memory by the logits",
        ),
    ),
    (
        "auto_find_batch_size",
        Approximation("the batch that is stated is forecast", "the program halves it where it does not fit"),
    ),
    ("tf32", NoInfluence("GEMMs have 16 bits")),
    (
        "accelerator_config.split_batches",
        Decision("with it the stated batch is divided over all processes", ("batch.micro=1",)),
    ),
    ("accelerator_config*", DATA),
    ("use_cpu no_cuda", CPU),
    ("mp_parameters", Decision("model parallelism of SageMaker is not described", ("plan.tp=1",))),
    ("deepspeed deepspeed_config", NoInfluence("without a file of settings the launcher changes nothing")),
    (
        "vision_tower mm_* pretrain_mm* vision_* image_size freeze_vision* freeze_mm* group_by_modality*",
        Approximation("the language model alone is forecast, without encoders of images", SHORT),
    ),
    (
        "tune_mm_* freeze_backbone freeze_llm",
        Decision(
            "it says which part of a multimodal model is trained; meshcast trains all, or adapters",
            ("train.mode=full",),
        ),
    ),
)
"""On arguments of the Trainer, and on those that scripts on it commonly have."""


def name_accelerate(names: str) -> str:
    return " ".join(f"accelerate.{name}" for name in names.split())


def name_fsdp(names: str) -> str:
    return " ".join(
        f"{section}.{name}" for name in names.split() for section in ("accelerate.fsdp_config", "fsdp_config")
    )


ACCELERATE_VERDICTS = list_verdicts(
    (
        name_accelerate("compute_environment debug downcast_bf16 machine_rank main_* rdzv* same_network tpu* gpu_ids"),
        START,
    ),
    (name_accelerate("enable_cpu_affinity num_cpu_threads* quiet module no_python tee role max_restarts rank"), START),
    (
        name_accelerate("monitor_interval log_dir command* env aws_* use_parallelism_config mpirun* num_machines vm"),
        START,
    ),
    (name_accelerate("no_tpu_cluster ipex_config* deepspeed_hostfile dynamo_backend config_file"), START),
    ("launcher.*", START),
    (name_accelerate("use_cpu cpu"), CPU),
    (name_accelerate("deepspeed_config.zero3_save* deepspeed_config.deepspeed_*"), START),
    (name_accelerate("deepspeed_config.zero3_init_flag deepspeed_config.*nvme_path"), LOADING),
    (name_accelerate("deepspeed_config.gradient_clipping"), OPTIMISATION),
    (name_fsdp("cpu_ram* sync_module* state_dict* final_state* use_orig* cpu_offload_pin*"), LOADING),
    (
        name_fsdp("transformer_layer* min_num* auto_wrap* ignored* limit_all_gathers xla* backward_prefetch version"),
        UNITS,
    ),
    (name_fsdp("sharding_strategy reshard_after_forward mixed_precision_policy"), UNITS),
    (name_fsdp("forward_prefetch"), NoInfluence("the next unit is gathered ahead in either case")),
    (
        "accelerate.parallelism_config.* parallelism_config.*",
        NoInfluence("it says how a degree that the file does not use would run"),
    ),
    (name_accelerate("dynamo_config.*"), NoInfluence("the profile of a compiler has its defaults")),
    (name_accelerate("fp8_config.*"), Approximation("FP8 with delayed scales of tensors is forecast", LITTLE)),
    (name_accelerate("megatron_lm_config.*"), Decision("degrees of Megatron-LM are not read here", ("plan.tp=1",))),
)
"""On settings of Accelerate."""


def name_deepspeed(names: str) -> str:
    return " ".join(f"deepspeed.{name}" for name in names.split())


def name_zero(names: str) -> str:
    return " ".join(f"deepspeed.zero_optimization.{name}" for name in names.split())


DEEPSPEED_VERDICTS = list_verdicts(
    (
        name_deepspeed("_meshcast* steps_per_print wall_clock_breakdown dump_state tensorboard* wandb* csv_monitor*"),
        NAMES,
    ),
    (name_deepspeed("comet* comms_logger* flops_profiler* memory_breakdown profile* monitor_config* log_*"), NAMES),
    (name_deepspeed("optimizer.params* optimizer.legacy_fusion scheduler* fp16.* bf16.* bfloat16.*"), OPTIMISATION),
    (
        name_deepspeed("gradient_clipping gradient_predivide_factor prescale_gradients gradient_allreduce_op"),
        OPTIMISATION,
    ),
    (name_deepspeed("zero_allow_untested* zero_force_ds* seed local_rank disable_python_gc"), START),
    (
        name_deepspeed("checkpoint* nebula* load_universal* dataloader_drop_last train_steps elasticity* autotuning*"),
        SAVING,
    ),
    (name_deepspeed("data_efficiency* curriculum*"), PADDING),
    (
        name_deepspeed("aio*")
        + " "
        + name_zero("*.pin_memory *.buffer_count *.buffer_size *.max_in_cpu *.nvme_path *.fast_init")
        + " "
        + name_zero("*.pipeline*"),
        Approximation("copies to the host run at the rate of the links", "the forecast is too fast with small buffers"),
    ),
    (name_deepspeed("aio*"), Approximation("disks are forecast at their rate", SHORT)),
    (
        name_zero("round_robin_gradients use_multi_rank* legacy_stage1 parameter_alignment"),
        NoInfluence("how gradients lie in their buffers; the same bytes are moved"),
    ),
    (name_zero("stage3_gather_* gather_16bit* elastic_checkpoint load_from_fp32* pipeline_loading*"), SAVING),
    (name_zero("ignore_unused* log_trace* override_module_apply enable_sanity* memory_efficient_linear"), START),
    (name_zero("cpu_offload_use_pin* compute_grad_norm"), START),
    (
        name_zero("allgather_bucket_size"),
        NoInfluence("updated weights are gathered into their place at once (all_gather_dp_groups)"),
    ),
    (
        name_zero("mics_hierarchical_params_gather stage3_module_granularity* stage3_allgather_sequential leaf_module*")
        + " "
        + name_zero("stage3_use_all_reduce* model_persistence* stage3_model_persistence*"),
        Approximation("all-gathers are forecast in one step, module by module", LITTLE),
    ),
    (name_zero("offload_*.ratio"), Approximation("all states are forecast in host memory", LONG)),
    (
        name_zero("zero_quantized_nontrainable_weights zenflow* *.super_offload *.cpuadam_cores_perc"),
        Approximation("it is left out", EITHER),
    ),
    (name_zero("offload_optimizer offload_param"), NoInfluence("nothing is offloaded")),
    (name_zero("cpu_offload_param*"), NoInfluence("the section offload_param replaces it")),
    (
        name_deepspeed("communication_data_type seq_parallel_communication_data_type gradient_accumulation_dtype"),
        Approximation("gradients are reduced in the format in which they are accumulated", LITTLE),
    ),
    (
        name_deepspeed("amp.* torch_autocast.*"),
        Approximation("mixed precision of DeepSpeed itself is forecast", LITTLE),
    ),
    (name_deepspeed("compile.*"), Approximation("compilation by DeepSpeed is left out", LONG)),
    (
        name_deepspeed("activation_checkpointing.*"),
        NoInfluence("models of transformers recompute by PyTorch's function, which the section does not change"),
    ),
    (
        name_deepspeed(
            "sparse_attention* compression_training* progressive_layer_drop* quantize_training* eigenvalue*"
        ),
        Approximation("it is left out", EITHER),
    ),
    (name_deepspeed("hybrid_engine*"), Approximation("a step of training is forecast, without generation", SHORT)),
    (name_deepspeed("pipeline*"), Decision("stages of a PipelineModule are code", ("plan.pp=1",))),
    (name_deepspeed("tensor_parallel.*"), Decision("tensor parallelism of DeepSpeed", ("plan.tp=1",))),
)
"""On settings of DeepSpeed's configuration."""

VERDICTS: dict[str, Verdict] = {**DEEPSPEED_VERDICTS, **ACCELERATE_VERDICTS, **TRAINER_VERDICTS}
"""On all of them."""
