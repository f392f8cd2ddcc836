"""What becomes of settings of Megatron-LM that are no keys of a job: of its releases from 2020 to 2026, and its forks.

Source: NVIDIA/Megatron-LM @d98e8a64dd (and its tags v1.0 to core_v0.19.0), megatron/training/arguments.py with the
classes that it makes arguments of; alibaba/Pai-Megatron-Patch @a098ca5, megatron_patch/arguments.py;
deepspeedai/Megatron-DeepSpeed @4efb479d and bigscience-workshop/Megatron-DeepSpeed @8387ae17, megatron/arguments.py.
"""

from __future__ import annotations

from meshcast.simulator.formats.launch.verdicts import Approximation, Decision, NoInfluence, Verdict, Verdicts

FAST, SLOW = "the forecast is too fast", "the forecast is too slow"
LARGE, SMALL = "the forecast memory is too large", "the forecast memory is too small"


def judge(verdict: Verdict, *patterns: str) -> Verdicts:
    """Returns the same verdict on all names of these patterns."""
    return dict.fromkeys(patterns, verdict)


APPROXIMATIONS: Verdicts = {
    "batch_invariant.*": Approximation("batch-invariant kernels are forecast as the usual ones", FAST),
    **judge(
        Approximation("kernels are fused as in the profile of the framework", FAST),
        "no_masked_softmax_fusion|no_scaled_masked_softmax_fusion|no_bias_.*fusion",
        "no_persist.*|no_async_tensor.*|disable_jit_fuser",
        "(masked_softmax|bias_.*|persist_layer_norm).*_fusion",
    ),
    "spec|model_spec": Approximation("a specification of modules is code: the usual modules are forecast"),
    **judge(
        Approximation("attention is forecast over whole sequences: state batch.documents", SLOW),
        "reset_attention_mask|dataloader_inter_document_masking",
    ),
    "sft": Approximation("samples are forecast as sequences of full length: state batch.documents", SLOW),
    **judge(
        Approximation("a step with the full global batch is forecast, not those of the ramp before it"),
        "rampup_batch_size|decrease_batch_size_if_needed",
    ),
    **judge(
        Approximation("full attention is forecast in every layer", SLOW),
        "experimental_attention_variant|linear_.*|dsa_.*|gdp_.*|attention_output_gate",
    ),
    "sgd_momentum": NoInfluence("its buffer has the same size for every value"),
    "muon_(no_)?split_qkv": Approximation("queries, keys and values are forecast as matrices of their own"),
    "muon_fp32_matmul_prec": Approximation("iterations are forecast in bf16, as with medium", FAST),
    "muon_scalar_optimizer": Approximation("Adam is forecast for what is no matrix"),
    **judge(
        NoInfluence("it changes the values of the update, not its kernels"),
        "muon_(momentum|scale_mode|coefficient_type|extra_scale_factor)|adaptive_muon.*|lion_.*|soap_.*",
    ),
    **judge(
        Approximation("all layers are forecast in the format of the recipe", FAST),
        "first_last_layers_bf16|num_layers_at_.*_in_bf16",
    ),
    **judge(
        Approximation("attention is forecast in 16 bits", SLOW),
        "fp8_multi_head_attention|fp8_output_proj",
    ),
    "no_fp8_wgrad|fp8_wgrad": Approximation("weight gradients are forecast in the format of the recipe"),
    **judge(
        Approximation("activations have the format of the framework there"),
        "fp16_lm_cross_entropy|fp32_residual_connection|embedding_weights_in_fp32|output_logit_dtype",
        "moe_.*_dtype",
    ),
    **judge(
        Approximation("every stage offloads alike, and the GPU waits for no copy to the host", SMALL),
        ".*offload.*inflight.*|delta_offload.*",
    ),
    **judge(
        Approximation("copies to and from the host have the schedule of meshcast"),
        "cpu_offloading_(activations|double_buffering|retain_pinned.*)",
    ),
    **judge(
        Decision("whether weights lie in host memory is decided by it", ("plan.offload=[activations]",)),
        "cpu_offloading_weights",
    ),
    **judge(
        Approximation("the loss has the kernels of the framework's profile", SLOW),
        "cross_entropy_loss_fusion|cross_entropy_fusion_impl",
    ),
    **judge(
        NoInfluence("Megatron-Core delays weight gradients only with overlap_moe_expert_parallel_comm"),
        "delay_wgrad_compute",
    ),
    **judge(Approximation("memory of attention is freed behind the pass", LARGE), "ep_overlap_early_attn.*"),
    **judge(
        Approximation("gradients of the output layer are deferred in a pipeline whose passes do not overlap", SLOW),
        "defer_embedding_wgrad_compute",
    ),
    "interleave_group_size|enable_zb_runtime": NoInfluence("the pipeline has no chunks that run in groups"),
    "disable_backward_fusion|use_interlaced_schedule": NoInfluence("stages do not share the vocabulary"),
    "enable_vocab_parallel|enable_layer_redistribution|final_stage_num_layers": NoInfluence("there is one stage"),
    "schedule_timer_(start|end)": NoInfluence("durations of passes are forecast"),
    **judge(Approximation("activations of chunks are not offloaded", LARGE), "offload_(chunk_num|time|overlap_sr)"),
    "wgrad_deferral_limit": NoInfluence("no weight gradients of the output layer are deferred"),
    "moe_shared_expert_overlap": NoInfluence("no shared experts run beside an exchange of tokens"),
    "moe_shared_expert_gate": Approximation("the gate of shared experts is left out", FAST),
    **judge(
        Approximation("routing, permutation and experts have the kernels of the profile"),
        "moe_permute_fusion.*|no_moe_.*|moe_use_grouped_tensor|use_grouped_gemm_for.*",
        "moe_use_legacy.*|moe_mlp_glu.*|moe_apply_probs.*|moe_router_padding.*|moe_single_grouped.*",
        "moe_hybridep_.*|moe_ncclep.*|moe_paged.*",
    ),
    "moe_use_upcycling|moe_upcycling.*": NoInfluence("it is of the conversion of a checkpoint"),
    "mtp_hybrid_override_pattern": NoInfluence("it is of models with state-space layers"),
    **judge(
        Approximation("the usual layer is forecast"),
        "mhc_.*|enable_mhc.*|mup_.*|use_mup|qk_clip.*|fused_residual.*",
        "mtp_(hsm|use_repeated|detach|standalone).*|engram.*",
    ),
    **judge(
        Approximation("messages of warm-up and flush overlap as those between"),
        "overlap_p2p_communication_warmup_flush",
    ),
    **judge(
        Approximation("weights are gathered behind the whole update", SLOW), "overlap_param_gather_with_optimizer_step"
    ),
    **judge(
        Approximation("buckets of gradients have the size and the order of the framework's profile"),
        "ddp_num_buckets|ddp_bucket_size|ddp_pad_buckets.*|suggested_communication.*|no_align_.*",
        "no_delay_grad_reduce|delay_param_gather|delay_grad_reduce|ddp_reduce_scatter.*|ddp_param_name.*",
        "(no_)?align_.*",
    ),
    **judge(
        NoInfluence("no recipe quantises"),
        "fp8_param_gather|fp4_param_gather|fp8_param|fp4_param",
    ),
    **judge(
        Approximation("copies of weights are those of the profile"),
        "reuse_grad_buf_for_mxfp8.*|keep_fp8_transpose.*|.*transpose_cache.*",
    ),
    **judge(
        Approximation("sharded data parallelism has the defaults of meshcast"),
        "outer_dp_sharding_strategy|megatron_fsdp_.*|use_nccl_ub|nccl_ub|fsdp_.*|enable_full_sharding.*",
        "torch_fsdp2_.*|gtp_.*",
    ),
    **judge(
        Approximation("communication is forecast with the defaults of the framework"),
        "tp_comm_.*|disable_tp_comm.*|use_ring_exchange_p2p|use_sharp|sharp_enabled_group",
        "symmetric_ar_type|high_priority.*",
    ),
    **judge(
        Approximation("the step of training is forecast, without the rollouts", FAST),
        "perform_rl_step|rl_.*|grpo_.*|langrl.*|refit_method",
    ),
    **judge(
        Approximation("messages between stages are those of the profile"),
        "no_scatter_gather_tensors_in_pipeline|scatter_gather_tensors_in_pipeline",
    ),
    "standalone_embedding_stage": Approximation("the embedding is on the first stage with layers"),
    "retro_.*": Approximation("retrieval is left out", FAST),
    **judge(
        Approximation("the usual attention and embedding are forecast"),
        "relative_attention.*|clone_scatter_output.*|no_clone_scatter.*|apply_residual_connection_post.*",
        "add_position.*",
    ),
    **judge(
        Approximation("every tensor-parallel rank keeps the inputs of recomputed layers whole", LARGE),
        "distribute_saved_activations|distribute_checkpointed_activations|partition_activations",
        "contigious_checkpointing",
    ),
    **judge(
        Approximation("all micro-batches recompute alike", SLOW), "num_microbatches_with_partial_activation_checkpoints"
    ),
    **judge(
        Approximation("kernels are forecast as those of Transformer Engine"),
        "use_legacy_models|transformer_type|use_te|use_transformer_engine_op_fuser|use_te_activation.*",
        "use_kitchen_attention",
    ),
    **judge(
        Approximation("CUDA graphs are those of cuda_graph_impl and its modules"),
        "enable_cuda_graph|cuda_graph_.*|external_cuda_graph|optimizer_cuda_graph",
    ),
    **judge(
        Approximation("a step of the model alone is forecast, without a teacher", FAST),
        "logits_(save|load).*|export_.*|flextron|.*_int_list|budget_.*|kd|mos|kd_.*|.*_teacher",
    ),
    **judge(
        Approximation("a step with sequences of full length is forecast"),
        "curriculum.*|random_ltd|data_efficiency.*|use_dataset_only|step_batch_size_schedule",
    ),
    **judge(
        Decision("which weights are trained is decided by it", ("train.mode=full",)),
        "freeze_(all_layers|lm|vit|llm|clip.*|LM|ViT)",
    ),
}
"""Settings that the forecast does not follow."""

DECISIONS: Verdicts = {
    **judge(
        Decision("the model has an encoder and a decoder", ("model=model.yaml",)),
        "encoder_num_layers|decoder_num_layers|decoder_seq_length|retriever_seq_length",
        "encoder_(tensor|pipeline)_.*|pipeline_model_parallel_split_rank",
    ),
    **judge(
        Decision("layers differ, by a file that is not read", ("model=config.json",)),
        "heterogeneous_layers_config.*|heterogeneous_block.*|lfm_layer_types",
    ),
    **judge(
        Decision("context parallelism differs from sequence to sequence", ("plan.cp=1",)),
        "dynamic_context.*",
    ),
    **judge(
        Decision("it shards weights over more ranks than tp", ("plan.fsdp=true",)),
        "(expert_)?tensor_parallel_num_weight_shards",
    ),
    "moe_extended_tp": Decision("experts are sharded over tp and ep ranks together", ("plan.etp=1",)),
    **judge(
        Decision("the number formats are in a file that is not read", ("precision.compute=bf16",)),
        "kitchen_.*|use_kitchen|quant_recipe|te_precision_config_file",
    ),
    "analyzing_.*": Decision("it reads the data without a step of training", ("--assume-defaults",)),
    **judge(
        Decision("it is of DeepSpeed, which no --deepspeed starts", ("plan.zero=1",)),
        "zero_stage|no_pipeline_parallel|deepspeed_activation_checkpointing|ds_sequence_parallel.*",
        "ds_inference|pp_partition_method|moe_expert_parallel_size",
    ),
    "model_parallel_size|batch_size": Decision("this release of the program refuses it", ("--assume-defaults",)),
    **judge(
        Decision("the model is not a decoder of text alone", ("model=model.yaml",)),
        "(img|image|vision|mm|swin|dino|ict|biencoder|bert)_.*|patch_(size|dim).*|num_classes|language_model_type",
        "(audio|video|llava|mimo)_.*|.*_encoder_model|total_seq_length",
        "vision_model_type",
    ),
}
"""Settings that decide the plan or the memory."""

WITHOUT_INFLUENCE: Verdicts = {
    **judge(
        NoInfluence("it is about what is logged"),
        "log_.*|.*_log_.*|no_log.*|logging_.*|timing_.*|tensorboard.*|wandb.*|(no_|enable_)?one_logger.*",
        "(no_)?barrier_with.*|otel_.*|throughput_window.*|app_tag.*|report_.*|memory_keys|set_level.*",
        "filter_warnings|modules_to_filter|logger|timers|config_logger_dir|log_dir|dump_.*|mlflow.*",
        "(std|file|stderr)_sink.*|sink_level|disable_(wandb|tensorboard|mlflow)",
    ),
    **judge(
        NoInfluence("it is about checkpoints, which no step of training waits for"),
        "save|save_.*|load|load_.*|no_load.*|no_save.*|(no_)?ckpt.*|dist_ckpt.*|async_.*",
        "auto_detect_ckpt.*|use_.*ckpt.*|use_.*checkpoint.*|finetune|checkpoint|non_persistent.*",
        "persistent_save.*|pretrained_checkpoint|most_recent_k|replication.*|.*strict_fsdp.*",
        "distrib_optim.*|fully_parallel.*|auto_continue_train|disable_last_saving|override_ckpt.*",
        "load_main_params.*|(no_)?exit_on_missing.*|universal_checkpoint|reset_iteration",
        "hetereogenous_dist_checkpoint|.*_checkpoint_path|convert_checkpoint.*",
    ),
    **judge(
        NoInfluence("it is a number of the update, which costs the same"),
        "lr|lr_.*|min_lr|head_lr_mult|decoupled.*|weight_decay.*|start_weight_decay|end_weight_decay",
        "no_weight_decay.*|apply_wd.*|adam_.*|clip_grad|grad_norm_skip.*|warmup|loss_scale.*",
        "initial_loss_scale|min_loss_scale|min_scale|hysteresis|override_(opt|lr)_.*",
        "use_checkpoint_(lr|opt).*|wd_incr.*|wsd_.*|calculate_per_token.*|use_normhead|scheduler|num_iters",
        "dynamic_loss_scale",
    ),
    **judge(
        NoInfluence("it is about the data: the tokens of a step are those of its batch"),
        "split|data|data_.*|(train|valid|test)_(data|weighted|split).*|(train|valid)_dataset.*|vocab_file",
        "merge_file|vocab_extra_ids|tokenizer.*|patch_tokenizer_type|tiktoken.*|legacy_tokenizer",
        "special_tokens|trust_remote_code|chat_template|null_tokenizer.*|num_workers|mock_data|fim_.*",
        "dataloader.*|(no_)?mmap.*|(no_)?create_attention.*|reset_position_ids|eod_.*|num_dataset.*",
        "no_use_tokenizer.*|use_tokenizer.*|per_.*path|full_validation|multiple_validation.*|mid_level.*",
        "renormalize.*|sample_rate|mask_.*|short_seq_prob|dataset.*|no_data_sharding|object_storage.*",
        "s3_cache.*|use_one_sent.*|.*_data_path|train_mode|allow_ambiguous.*|use_gigatoken|pad_vocab_size",
        "train_samples|train_tokens|num_tokens_to_.*|iterations_to_skip|source_seq_len|target_seq_len",
        "max_padding_length|phase_transition.*|loss_on_targets.*|skip_train_iteration.*",
    ),
    **judge(
        NoInfluence("it is about evaluation or generation: a step of training is forecast"),
        "eval_.*|skip_train|validation.*|start_eval.*|no_manual_gc_eval|inference_.*|generation_length",
        "top_k|top_p|temperature|prompts?|prompt_path|max_tokens_to_oom|.*text_generat.*",
        "repetition_penalty|num_fewshot|output_bert.*|flash_decode|.*chunked_prefill.*|mlp_chunks.*",
        "return_log.*|skip_prompt.*|decode_only.*|num_speculative.*|use_legacy_static.*|cache_mla.*",
        "mamba_inference.*|nccl_all_reduce_for_prefill",
    ),
    **judge(
        NoInfluence("it is about the first values of the weights"),
        "init_method_.*|(embedding_|output_layer_)?init_method.*|seed|.*random_.*|use_cpu_init.*",
        "(no|perform)_initialization|init_model_with.*|data_parallel_random.*|te_rng_tracker|use_te_rng.*",
        "no_record.*|lazy_mpu_init|embedding_init.*",
    ),
    **judge(
        NoInfluence("it is about failures"),
        "exit_.*|check_.*|no_check_.*|rerun_.*|error_injection.*|straggler.*|disable_straggler.*",
        "inprocess.*|ft_.*|enable_ft.*|calc_ft.*|adlr_.*|max_restarts|result_rejected.*|gpu_sniff.*",
        "fault_.*|flight_recorder.*|verify_integrity|run_workload.*|hang_.*|train_sync_interval|odc_.*",
    ),
    **judge(
        NoInfluence("it is about measuring"),
        "profile.*|use_pytorch_profiler|pytorch_profiler.*|use_nsys.*|nvtx_.*|record_.*|memory_snapshot.*",
        "test_mode|wall_clock.*|trace_.*|torch_profiler.*|disable_profiler.*|dump_pp_data|pp_warmup",
    ),
    **judge(
        NoInfluence("it is about how processes start"),
        "master_.*|node_rank|rdzv.*|local_rank|local_ranks.*|rank|tee|role|redirects|start_method",
        "monitor_interval|run_path|module|no_python|standalone|distributed_backend|distributed_timeout.*",
        "(disable|use|enable)_gloo.*|create_all_gather_group|fake_process_group|nccl_communicator.*",
        "jobid|reset_progress",
        "pipeline_model_parallel_comm_backend|sbatch_.*|hostfile|include|exclude|launcher.*|ds_config.*",
        "manual_gc.*|empty_unused.*|use_persistent.*|disable_msc|enable_msc|disable_symmetric.*",
        "enable_experimental|msc_.*",
    ),
    **judge(
        NoInfluence("it is a constant, or a choice, of kernels of the same cost"),
        "rotary_.*|rope_.*|use_rope_scaling|yarn_.*|no_yarn.*|mscale.*|original_max_position.*",
        "norm_epsilon|layernorm_epsilon|(no_)?rope_freq|no_rope_freq|attention_softmax_in_fp32",
        "apply_query_key.*|no_query_key.*|softmax_scale|squared_relu|openai_gelu|onnx_safe|mrope.*",
        "glu_linear.*|activation_func.*|use_rotary_.*|sliding_window_.*|fp8_amax.*|fp8_interval|fp8_margin",
        "tp_only_amax_red|use_flashinfer.*|bias_.*fusion|gradient_reduce_div.*|no_gradient_reduce.*",
        "ddp_average.*|average_in_collective|kv_lora_.*scale|use_fused_weighted.*",
        "memory_efficient_layer_norm|no_contiguous_buffers.*|use_contiguous_buffers.*|DDP_impl",
        "attention_dropout_.*|flash_attention_version",
    ),
    **judge(
        NoInfluence("it is about how tokens are routed: experts get the numbers of model.moe.routing"),
        "moe_aux.*|moe_z_loss.*",
        "moe_router_(load|score|topk_|num_groups|group|pre|bias|dtype|force|quantile|enable_bias).*",
        "moe_per_layer.*|moe_token_drop_policy|moe_input_jitter.*|moe_routing_trace.*|moe_enable_routing.*",
        "moe_grad_scale.*|moe_loss_coeff|moe_router_type|router_type|moe_min_capacity|moe_pad_expert.*",
        "moe_expert_rank.*|mtp_loss.*|mtp_grad.*",
    ),
    "moe_grouped_gemm": NoInfluence("experts are forecast as one grouped product"),
    **judge(
        NoInfluence("it chooses the code that is forecast in any case"),
        "use_mcore_models|deprecated_use_mcore.*|use_mca|model_type",
        "distributed_data_parallel|lazy_.*|enable_autocast|autocast.*",
    ),
    **judge(
        NoInfluence("other settings say it, too"),
        "group_query_attention|train_batch_.*|override_.*|moe|use_distributed_.*|deprecated_.*|name",
        "run_name|model_name|version",
    ),
    **judge(
        NoInfluence("it is a trait of the program that time and memory do not depend on here"),
        "zero_(reduce|contig|allgather|allow|force).*|use_pin_memory|synchronize_each_layer",
        "profile_backward|deepspeed_mpi|deepscale.*|aml_.*|use_bnb_optimizer_name|lr_state_dict",
        "kill_switch.*|codecarbon.*|abort_on_unmet.*|pp_partition_method_name|inference",
    ),
}
"""Settings that change neither time nor memory."""

KERNELS = "it is a choice of kernels or of buffers that the profile of the framework has"

REST: Verdicts = {
    **judge(
        NoInfluence(KERNELS),
        "batch_p2p_(comm|sync)|deallocate_pipeline_outputs|variable_seq_lengths|pipeline_dtype|params_dtype|bucket_size|num_buckets",
        "overlap_p2p_comm|overlap_p2p_communication|fused_single_qkv_rope|mla_down_proj_fusion|(use|disable)_mamba_mem.*",
        "(no_)?pin_cpu_.*|store_param_remainders|.*_func|pad_buckets.*|persist_layer_norm|scaled_upper_triang.*|use_inference_.*",
        "delay_offload_.*|use_torch_optimizer_for_cpu_offload|moe_shared_expert_glu.*|barrier_.*|moe_token_dropping|use_tutel",
        "async_tensor_model_parallel_allreduce|sequence_parallel_.*|ds_fused_adam|cpu_torch_adam|disable_mem_efficient_ln",
    ),
    **judge(
        Approximation("gradients and communication have the formats of the framework's profile"),
        "fp32_allreduce|grad_reduce_in_fp32|.*_fp32_(local_)?accumulation|disable_bf16_reduced.*|mamba_training_ssm.*",
    ),
    **judge(
        Approximation("matrices are shared out over all of the weights, not bucket by bucket"),
        "use_layer_wise_distributed_optimizer|no_use_layer_wise.*",
    ),
    **judge(
        NoInfluence("it is about the data or the start of a run"),
        "indexer_.*|classes_fraction|embedding_path|faiss.*|iter_per_epoch|metadata_path|num_channels|.*same_sampling_seed.*",
        "offset_sampling.*|query_in_block.*|retriever_.*|rng|runtime_time_unit|sft_tokenizer.*|train|with_name_predicate|predicate",
        "attr|fn|dist|profiling|.*_idx_path|train_desc_path|valid_num_workers|repeated_dataloader|return_data_index|reweight_loss.*",
        "mean_noise.*|noise_density|adaptive_seq_len|out_seq_length|input_len|epochs|keep_last|task_list|time|verbosity|moe_eval_.*",
        "online_evaluation.*|transformer_timers|disable_parallel_output|z_loss_weight|sync_tp_duplicated.*|pad_vocab_size_to",
    ),
    **judge(
        Approximation("its activations and updates are those of the usual layers"),
        "is_hybrid_model|scattered_embeddings|split_transformers|memory_centric.*|tile_factor|mlp_type",
        "disable_bias_(attn|linear)_fc|attention_head_type|disable_moe_.*|moe_(train|min)_capacity.*|create_moe_param_group",
        "moe_input_feature_slicing|position_encoding_2d|optimizer_offload_(policy|chunk|auto).*|enable_zbh1_exact.*",
    ),
    **judge(
        Decision("the model is not a decoder of text alone", ("model=model.yaml",)),
        "tune_mm.*|num_frames|spatial_merge.*|temporal_patch.*|disable_vision.*|max_num_tiles|use_(tiling|thumbnail)|cvcuda.*",
        "allow_missing_vision.*",
    ),
    **judge(
        NoInfluence("it is about how processes start"),
        "mpi|export|container_\\w+|no_container\\w*|cpus_per_task|gpus_per_task|cpu_bind|gpu_bind|mem(_\\w+)?|partition|account",
        "job_name|output|error|exclusive|label|unbuffered|ntasks|nodelist|constraint|qos|chdir|wait|kill_on_\\w+|comment|dependency",
        "overlap|open_mode|distribution|network|signal|requeue|mail_\\w+|array|begin|hint|gpus|bind_to|map_by|allow_run_as_root|np",
        "rdma|host|hostfile|x|mca|oversubscribe|tag_output|start_method|log_line_prefix_template|num_accelerators|save_pid|env",
        "module|no_ssh(_\\w+)?|force_multi|launcher|launcher_args|ssh_port|bind_cores\\w*|enable_each_rank_log|no_local_rank|no_python",
    ),
    **judge(NoInfluence("the vocabulary counts: state model.vocab"), "extra_vocab_size"),
    **judge(Approximation("attention is forecast over whole sequences", SLOW), "sliding_window"),
}
"""Further settings of forks and of configuration classes."""

VERDICTS: Verdicts = {**DECISIONS, **APPROXIMATIONS, **WITHOUT_INFLUENCE, **REST}
