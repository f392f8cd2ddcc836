"""Words of other programs for keys and names of meshcast, for messages about words that are not valid."""

from __future__ import annotations

from collections.abc import Mapping

WORDS = {
    "tp": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tensor_parallel tp_size tp_degree",
    "pp": "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pipeline_parallel pp_size",
    "cp": "context_parallel_size context_parallel_degree context_parallel cp_size sequence_parallel_size sp",
    "dp": "data_parallel_size data_parallel_degree data_parallel dp_size data_parallel_replicate_degree",
    "ep": "expert_model_parallel_size expert_parallel_degree expert_parallel_size expert_parallel ep_size",
    "etp": "expert_tensor_parallel_size expert_tensor_parallel_degree expert_tensor_parallel",
    "chunks": "vpp vp virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank virtual_stages",
    "schedule": "pipeline_parallel_schedule pipeline_schedule pp_schedule pp_engine",
    "zero": "zero_stage zero_optimization use_distributed_optimizer stage distributed_optimizer",
    "shard": "data_parallel_shard_degree dp_shard shard_degree",
    "fsdp": "use_megatron_fsdp use_torch_fsdp2 fully_sharded fsdp2",
    "recompute": "activation_checkpointing activation_checkpoint recompute_granularity gradient_checkpointing ac",
    "recompute_layers": "recompute_num_layers",
    "global": "global_batch_size train_batch_size gbs batch_size global_batch",
    "micro": "micro_batch_size train_micro_batch_size_per_gpu local_batch_size per_device_train_batch_size mbs",
    "microbatches": "gradient_accumulation_steps grad_acc_steps num_microbatches accumulate_grad_batches",
    "sequence": "seq_length seq_len sequence_length max_seq_length seq max_length context_length",
    "layers": "num_layers n_layers num_hidden_layers n_layer",
    "hidden": "hidden_size d_model dim n_embd",
    "heads": "num_attention_heads n_heads n_head",
    "kv_heads": "num_query_groups num_key_value_heads n_kv_heads",
    "ffn": "ffn_hidden_size intermediate_size d_ff hidden_dim",
    "vocab": "vocab_size padded_vocab_size",
    "seq": "max_position_embeddings max_seq_len",
    "experts": "num_experts num_moe_experts num_local_experts n_routed_experts",
    "top_k": "moe_router_topk num_experts_per_tok topk",
    "expert_ffn": "moe_ffn_hidden_size moe_intermediate_size",
    "compute": "dtype mixed_precision params_dtype",
    "megatron-core": "megatron megatron-lm mcore megatron-bridge",
    "hf-trainer": "accelerate transformers trl",
    "llama-factory": "llamafactory",
    "all-to-all": "alltoall",
    "all-gather": "allgather all_gather",
}
"""Valid words, each with the words of other programs that mean it, in small letters."""


def list_meanings(words: Mapping[str, str]) -> dict[str, str]:
    """Returns the valid word by each word that means it. words: as `WORDS`."""
    return {other.replace("-", "_"): valid for valid, others in words.items() for other in others.split()}


MEANINGS = list_meanings(WORDS)


def find_meaning(word: str, valid: list[str], meanings: Mapping[str, str] = MEANINGS) -> str | None:
    """Returns the valid word that a word of another program means here; None if there is none."""
    plain = word.strip().lower().lstrip("-").replace("-", "_")
    meaning = meanings.get(plain.rpartition(".")[2])
    return meaning if meaning in valid else None
