"""The shape of a model in the words of Megatron-Core's ``TransformerConfig``, which NeMo and Megatron-Bridge share.

Source: NVIDIA/Megatron-LM @d98e8a64dd, megatron/core/transformer/transformer_config.py and
megatron/training/arguments.py, with their defaults.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import OFF, ON, Keys, SettingRow, Stated, is_null, read_number, read_words
from meshcast.simulator.models.load import find_model, load_model

SHAPE = (
    SettingRow("num_layers", "model.layers"),
    SettingRow("hidden_size", "model.hidden"),
    SettingRow("num_attention_heads", "model.heads"),
    SettingRow("ffn_hidden_size", "model.ffn"),
    SettingRow("kv_channels", "model.head_dim"),
    SettingRow("num_query_groups", "model.kv_heads"),
    SettingRow("max_position_embeddings", "model.seq"),
    SettingRow("rotary_percent", "model.rope_share", "number", silent=1.0),
    SettingRow("hidden_dropout", "model.dropout", "number", silent=0.1),
    SettingRow("qk_layernorm", "model.qk_layernorm", "switch", ON, silent=False),
    SettingRow("qk_l2_norm", "model.qk_layernorm", "switch", {True: "l2"}),
    SettingRow("mtp_num_layers", "model.mtp", silent=0),
    SettingRow(
        "softmax_type",
        "model.sinks",
        "text",
        {"vanilla": False, "off-by-one": False, "learnable": True},  # of which the learnable alone has parameters
        silent=False,
    ),
    SettingRow("vocab_size", "model.vocab"),
    SettingRow("padded_vocab_size", "model.vocab"),
)
"""Settings of every program on Megatron-Core."""

POSITIONS = SettingRow(
    "position_embedding_type",
    "model.positions",
    "text",
    {
        **{"learned_absolute": "learned", "rope": "rope", "none": "none", "yarn": "rope", "mrope": "rope"},
        **{
            "absolute": "learned",
            "rotary": "rope",
            "alibi": "alibi",
        },  # words of bigscience-workshop/Megatron-DeepSpeed
    },
    silent="learned",
)

EXPERTS = (
    SettingRow("moe_router_topk", "model.moe.top_k", silent=2),
    SettingRow("moe_topk", "model.moe.top_k"),  # of Pai-Megatron-Patch
    SettingRow("moe_ffn_hidden_size", "model.moe.expert_ffn"),
    SettingRow("moe_router_enable_expert_bias", "model.moe.router_bias", "switch", ON, silent=False),
    SettingRow("moe_expert_capacity_factor", "model.moe.capacity", "number"),
    SettingRow("moe_latent_size", "model.moe.latent.width"),
    SettingRow("activation_func_clamp_value", "model.moe.clamped", "number", {7.0: True}),  # gpt-oss
)
"""Settings of models with experts."""

LATENT = (
    SettingRow("kv_lora_rank", "model.mla.kv_lora_rank", silent=512),
    SettingRow("q_lora_rank", "model.mla.q_lora_rank"),
    SettingRow("qk_head_dim", "model.mla.qk_nope", silent=128),
    SettingRow("qk_nope_head_dim", "model.mla.qk_nope"),  # of Pai-Megatron-Patch, as the next
    SettingRow("qk_pos_emb_head_dim", "model.mla.qk_rope", silent=64),
    SettingRow("qk_rope_head_dim", "model.mla.qk_rope"),
    SettingRow("v_head_dim", "model.mla.v", silent=128),
)
"""Settings of models with multi-latent attention."""

MAMBA = (
    SettingRow("mamba_head_dim", "model.ssm.head_dim", silent=64),
    SettingRow("mamba_state_dim", "model.ssm.state", silent=128),
    SettingRow("mamba_num_groups", "model.ssm.groups", silent=8),
    SettingRow("mamba_num_heads", "model.ssm.heads"),
)
"""Settings of hybrid models."""

COMMAND_LINE = (
    POSITIONS,
    SettingRow(
        "normalization", "model.norm", "text", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, silent="layernorm"
    ),
    SettingRow("swiglu", "model.gated", "switch", ON, silent=False),
    SettingRow("quick_geglu", "model.gated", "switch", {True: True}),
    SettingRow("untie_embeddings_and_output_weights", "model.tied", "switch", OFF, silent=True),
    SettingRow("use_rotary_position_embeddings", "model.positions", "switch", {True: "rope"}),
    SettingRow("disable_bias_linear", "model.mlp_bias", "switch", OFF, silent=True),
    SettingRow("num_experts", "model.moe.experts"),
)
"""Settings whose names on the command line are not those of the configuration classes."""

FORKS = (
    SettingRow("add_bias_linear", "model.mlp_bias", "switch", ON),
    SettingRow("num_moe_experts", "model.moe.experts"),
    SettingRow("glu_activation", "model.gated", "text", dict.fromkeys(("swiglu", "geglu", "reglu", "liglu"), True)),
    SettingRow("use_alibi_mask", "model.positions", "switch", {True: "alibi"}),
    SettingRow("embed_layernorm", "model.embedding_norm", "switch", {True: True}),
    SettingRow("num_key_value_heads", "model.kv_heads"),
    SettingRow("n_head_kv", "model.kv_heads"),
    SettingRow("intermediate_size", "model.ffn"),
    SettingRow("use_llama2_rotary_position_embeddings", "model.positions", "switch", {True: "rope"}),
    SettingRow("use_mistral_rotary_position_embeddings", "model.positions", "switch", {True: "rope"}),
)
"""Settings of forks that are read as those of Megatron-LM: of Primus, which names fields of the configuration, of
both Megatron-DeepSpeeds, and of Pai-Megatron-Patch."""

CONFIGURATION = (
    POSITIONS,
    SettingRow(
        "normalization",
        "model.norm",
        "text",
        {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm", "layernorm1p": "layernorm1p"},
        silent="layernorm",
    ),
    SettingRow("gated_linear_unit", "model.gated", "switch", ON, silent=False),
    SettingRow(
        "activation",
        "model.gated",
        "text",
        {"swiglu": True, "fast-swiglu": True, "geglu": True, "fast-geglu": True, "gelu": False, "squared-relu": False},
    ),
    SettingRow("share_embeddings_and_output_weights", "model.tied", "switch", ON, silent=True),
    SettingRow("add_bias_linear", "model.mlp_bias", "switch", ON, silent=True),
    SettingRow("bias", "model.mlp_bias", "switch", ON),
    SettingRow("num_moe_experts", "model.moe.experts"),
)
"""The same in the classes, and in the YAML files of NeMo 1 (``bias``, ``activation``)."""

FUNCTIONS = {"geglu": "gelu", "fast-geglu": "gelu", "squared-relu": "relu2"}
"""Activation functions of the YAML files of NeMo 1 that the gate alone does not tell."""

TOKENIZERS = {
    "gpt2bpetokenizer": 50257,
    "gptsentencepiecetokenizer": 256000,
    "llama2tokenizer": 32000,
    "llama3tokenizer": 128256,
    "tiktokenizer": 131072,
}
"""Usual vocabularies of tokenizers, for files that state none; they are assumptions."""


NO_VOCABULARY = "no vocabulary is stated, and the tokenizer does not tell it; "
"""Begin of the reason for a vocabulary that nothing tells."""


def read_shape(reading: Reading, rows: tuple[SettingRow, ...]) -> None:
    """Reads the shape of the model. rows: `COMMAND_LINE` or `CONFIGURATION`."""
    if (
        reading.take("num_layers", "num_moe_experts", "num_experts", "hybrid_layer_pattern", "hybrid_override_pattern")
        is None
    ):
        reading.ignore(reading.take("max_position_embeddings"), "the model is given by other means")
        return
    reading.read_rows((*SHAPE, *rows))
    keys = reading.keys
    _read_key_heads(reading)
    if (function := FUNCTIONS.get(reading.take_word("activation"))) is not None:
        reading.set_key("model.activation", function, "activation")
    _read_biases(reading)
    centred = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
    norm = keys.get("model.norm")
    if norm in ("layernorm", "rmsnorm") and reading.take_switch(*centred):
        reading.set_key("model.norm", f"{norm}1p", *centred)
    reading.take("no_position_embedding", *centred, "attention_dropout")
    hidden = keys.get("model.hidden", 0)
    if "model.ffn" not in keys and hidden:
        width = int(4 * hidden * 2 / 3 / 64) * 64 if keys["model.gated"] else 4 * hidden
        reading.set_key("model.ffn", width)
    _read_attention(reading)
    if "model.moe.experts" in keys:
        _read_experts(reading)
    else:
        _ignore_idle(reading, EXPERTS, "the model has no experts")
    _read_hybrid(reading)
    if "model.seq" not in keys and "batch.sequence" in keys:
        reading.set_key("model.seq", keys["batch.sequence"], "seq_length")
    if "model.vocab" not in keys:
        _assume_vocabulary(reading)


def _read_attention(reading: Reading) -> None:
    """Reads sliding windows and multi-head latent attention."""
    if (window := reading.take("window_size")) is not None and not is_null(window.value):
        before = read_digits(next(iter(read_words(window)), "").strip("()"))
        if before is None:
            raise window.refuse("it takes the tokens before and behind one", "Write (128,0)")
        reading.set_key("model.window", before + 1, "window_size")
        _read_full_layers(reading)
    if reading.take_switch("multi_latent_attention"):
        reading.read_rows(LATENT)
        for key in ("model.head_dim", "model.kv_heads"):
            reading.keys.pop(key, None)
        reading.set_key("model.positions", "rope", "multi_latent_attention")
        reading.set_key("model.qkv_bias", False, "multi_latent_attention")
    else:
        _ignore_idle(reading, LATENT, "latent attention is off")


def _read_full_layers(reading: Reading) -> None:
    """Reads which layers have full attention: every n-th, or those with 0 in a list like ([1]*5+[0])*4."""
    stated, layers = reading.take("window_attn_skip_freq"), reading.keys.get("model.layers")
    if stated is None or is_null(stated.value):
        return
    if (every := read_digits(str(stated.value))) is not None:
        reading.set_key("model.full_every", every, "window_attn_skip_freq")
    elif isinstance(layers, int) and (windows := _listed_layers(stated.value, layers)):
        full = [layer for layer, window in enumerate(windows) if not window]
        if full:
            reading.set_key("model.full_every", full, "window_attn_skip_freq")
    else:
        reading.ask(stated, "it is no number and no list of the layers that have a window", "model.full_every=4")


def _ignore_idle(reading: Reading, rows: tuple[SettingRow, ...], why: str) -> None:
    """Lists the settings of a part that the model does not have."""
    for row in rows:
        reading.ignore(reading.take(row.name), why)


def _assume_vocabulary(reading: Reading) -> None:
    for names in (TOKENIZER_TYPES, TOKENIZER_MODELS):
        tokenizer = reading.take(*names, decisive=False)
        known = _find_vocabulary(str(tokenizer.value)) if tokenizer and not tokenizer.unknown else None
        if tokenizer and known:
            reading.assume("model.vocab", known, f"the usual vocabulary of {tokenizer.value}")
            return
    reading.assume("model.vocab", 50257, f"{NO_VOCABULARY}that of GPT-2")


TOKENIZER_TYPES = ("tokenizer_type", "model.tokenizer.type", "tokenizer.type")
TOKENIZER_MODELS = ("tokenizer_model", "tokenizer_name_or_path", "tokenizer.tokenizer_model", "model.tokenizer.model")
"""Settings of the class of a tokenizer, and of the model whose tokenizer it is."""


def _find_vocabulary(tokenizer: str) -> int | None:
    """Returns the usual vocabulary of a tokenizer by its class, or by the model on the hub that it is of."""
    preset = find_model(tokenizer)
    return TOKENIZERS.get(tokenizer.lower()) or (load_model(preset).vocab if preset is not None else None)


def _read_biases(reading: Reading) -> None:
    """Biases of all linear layers, or of queries, keys and values alone."""
    keys = reading.keys
    everywhere = keys["model.mlp_bias"]
    keys["model.proj_bias"] = everywhere
    qkv = reading.take_switch("add_qkv_bias", "qkv_bias")
    keys["model.qkv_bias"] = everywhere or qkv
    for key in ("model.proj_bias", "model.qkv_bias"):
        if "model.mlp_bias" in reading.origins:  # not where the model is stated beside the file
            reading.origins[key] = reading.origins["model.mlp_bias"]
    if qkv:
        reading.set_key("model.qkv_bias", True, "add_qkv_bias", "qkv_bias")


def _read_key_heads(reading: Reading) -> None:
    """Reads how many heads of queries share keys and values."""
    has_groups = reading.take_switch("group_query_attention")
    if "use_checkpoint_args" not in reading.stated:
        if not has_groups and "group_query_attention" in reading.stated:
            reading.keys.pop("model.kv_heads", None)
        elif has_groups and "model.kv_heads" not in reading.keys:  # a default of arguments.py
            reading.set_key("model.kv_heads", 1, "group_query_attention")
    # of bigcode-project/Megatron-LM, arguments.py line 575
    if reading.take_word("attention_head_type") == "multiquery":
        reading.set_key("model.kv_heads", 1, "attention_head_type")


def _read_experts(reading: Reading) -> None:
    """Reads experts: which layers have them, their width, and the shared experts."""
    keys = reading.keys
    reading.read_rows(EXPERTS)
    if "model.moe.expert_ffn" not in keys:
        if "model.ffn" not in keys:  # the model is asked for
            return
        reading.set_key("model.moe.expert_ffn", keys["model.ffn"], "ffn_hidden_size")
    width = reading.take_count("moe_shared_expert_intermediate_size")
    if width:
        whole, rest = divmod(width, keys["model.moe.expert_ffn"])
        reading.set_key("model.moe.shared_experts", 1 if rest else whole, "moe_shared_expert_intermediate_size")
        reading.set_key("model.moe.shared_ffn", width, "moe_shared_expert_intermediate_size")
    elif (shared := reading.take_count("num_shared_experts")) is not None:  # of Pai-Megatron-Patch
        each = reading.take_count("shared_moe_ffn_hidden_size") or keys["model.moe.expert_ffn"]
        reading.set_key("model.moe.shared_experts", shared, "num_shared_experts")
        reading.set_key("model.moe.shared_ffn", shared * each, "num_shared_experts", "shared_moe_ffn_hidden_size")
    reading.take("moe_pad_expert_input_to_capacity")
    stated = reading.take("moe_layer_freq")
    if stated is None or is_null(stated.value) or "model.layers" not in keys:
        return
    has = _listed_layers(stated.value, keys["model.layers"])
    if has is None:
        reading.ask(stated, "it is no number and no list of the layers that have experts", "model.moe.every=1")
        return
    shift, every, dense = _find_nearest_layers(has)
    if shift >= every:
        why = (
            f"experts are forecast in every {every}. layer behind {dense} dense layers, not in {sum(has)} listed layers"
        )
        reading.approximate(stated, why)
    reading.set_key("model.moe.every", every, "moe_layer_freq")
    reading.set_key("model.moe.first_dense", dense, "moe_layer_freq")


def _find_nearest_layers(has: Sequence[bool]) -> tuple[int, int, int]:
    """Returns by how many layers those with experts are off at most if it is every n-th one behind d layers without,
    n, and d: as many layers as have experts, as near as may be."""
    wanted = np.flatnonzero(has)
    if not len(wanted):
        return 0, 1, len(has)
    nearest = []
    for every in range(1, len(has) // len(wanted) + 1):
        most = len(has) - every * len(wanted)
        least = max(0, most - every + 1)
        layers = np.arange(least, most + 1)[:, None] + every * np.arange(1, len(wanted) + 1) - 1
        shifts = np.abs(layers - wanted).max(axis=1)
        nearest.append((int(shifts.min()), every, least + int(shifts.argmin())))
    return min(nearest)


def _listed_layers(value: Any, layers: int) -> list[bool] | None:
    """Returns which layers a setting names: every n-th from the first on, or those with 1 in a list like
    ([0]*1+[1]*15)."""
    if isinstance(value, str) and not re.fullmatch(r"[\d\s()\[\]*+,]+", value):
        return None
    try:
        pattern = _evaluate(ast.parse(str(value), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError):
        return None
    if isinstance(pattern, int) and pattern >= 1:
        return [layer % pattern == 0 for layer in range(layers)]
    return [bool(flag) for flag in pattern] if isinstance(pattern, list) and len(pattern) == layers else None


def _evaluate(node: ast.AST) -> Any:
    """Evaluates a number, or a list composed of lists by ``+`` and ``*``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        size = len(left) if isinstance(left, list) else 1
        if isinstance(node.op, ast.Mult) and (not isinstance(right, int) or right * size > 100_000):
            raise ValueError(node)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError(node)


def _read_hybrid(reading: Reading) -> None:
    """Reads a hybrid model of Mamba-2, attention and MLP layers: by its pattern, or by the shares of its layers."""
    stated = reading.take("hybrid_override_pattern", "hybrid_layer_pattern")
    if stated is None or is_null(stated.value):
        if (stated := _find_shares(reading)) is None:
            return
    pattern, *depths = str(stated.value).replace("|", "").split("/")
    if not re.fullmatch(r"[-M*E]+", pattern):
        why = "meshcast knows layers of the letters M, *, - and E, with | between stages"
        reading.ask(stated, why, "model=nemotron-h-8b")
        return
    reading.ignore(_find_hybrid_spec(reading), "its layers are those of the pattern")
    names = "hybrid_override_pattern", "hybrid_layer_pattern", *SHARES
    reading.set_key("model.ssm.pattern", pattern, *names)
    reading.set_key("model.layers", len(pattern), *names)
    reading.read_rows(MAMBA)
    if "model.ssm.heads" not in reading.keys:
        reading.set_key("model.ssm.heads", 2 * reading.keys["model.hidden"] // reading.keys["model.ssm.head_dim"])
    _read_further_blocks(reading, stated, depths)


SHARES = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Shares of attention and of MLP layers, which place them where no pattern does."""

HYBRID_ENTRY = re.compile(r"pretrain_(mamba|hybrid)\.py$")
HYBRID_SPEC = re.compile(r"mamba_layer_specs|hybrid_layer_specs")
"""What says that layers without a share are of Mamba-2: the script, or the specification of its modules."""


def _find_shares(reading: Reading) -> Stated | None:
    """Returns the pattern of a hybrid model by the shares of its layers, or without any; None for a transformer."""
    launch, spec = reading.file.launch, _find_hybrid_spec(reading)
    is_hybrid = spec is not None or (launch is not None and HYBRID_ENTRY.search(launch.entry) is not None)
    attention, mlp = (
        read_number(stated) if (stated := reading.take(name)) is not None and not is_null(stated.value) else 0.0
        for name in SHARES
    )
    layers = reading.keys.get("model.layers")
    if not layers or not (is_hybrid or attention or mlp):
        return None
    origin = reading.stated.get(SHARES[0]) or spec or Stated("", SHARES[0], reading.file.where)
    return replace(origin, value=allocate_layers(layers, attention, mlp))


def _find_hybrid_spec(reading: Reading) -> Stated | None:
    """Returns the specification of modules, if it is that of hybrid models."""
    spec = reading.stated.get("spec")
    return spec if spec is not None and HYBRID_SPEC.search(str(spec.value)) else None


def allocate_layers(layers: int, attention: float, mlp: float) -> str:
    """Returns the pattern in which layers are placed by their shares.

    Source: ``pattern_from_ratios`` of megatron/core/models/hybrid/hybrid_layer_allocation.py, NVIDIA/Megatron-LM
    @d98e8a64: attention evenly, beginning and ending with Mamba-2; then MLP layers in place of Mamba-2.

    attention, mlp: shares of the layers, from 0 to 1.
    """
    attentions, mlps = round(layers * attention), round(layers * mlp)
    pattern = _place(["M"] * layers, "*", (layers - attentions) / (attentions + 1))
    return "".join(_place(pattern, "-", (layers - attentions - mlps) / mlps) if mlps else pattern)


def _place(pattern: list[str], letter: str, distance: float) -> list[str]:
    """Returns a pattern with a letter behind every `distance` layers of Mamba-2, in place of one of them."""
    left, placed = distance, list(pattern)
    for place in [i for i, old in enumerate(pattern) if old == "M"]:
        if left < 0.5:
            placed[place] = letter
            left += distance
        else:
            left -= 1
    return placed


def _read_further_blocks(reading: Reading, stated: Stated, depths: list[str]) -> None:
    """Reads the blocks of multi-token prediction of a hybrid model: behind slashes in its pattern, a depth each, or in
    a setting of their own. Without either the program has none.

    stated: the pattern of the model.
    """
    older = reading.take("mtp_hybrid_override_pattern")
    further = reading.keys.pop("model.mtp", 0)
    if not depths and further and older is not None and not is_null(older.value):
        stated, depths = older, [str(older.value)] * further
    if not depths:
        return
    if len(set(depths)) > 1 or not re.fullmatch(r"[-M*E]+", depths[0]):
        reading.ask(
            stated, "meshcast knows depths that have the same layers, of the letters M, *, - and E", "model.mtp=0"
        )
        return
    reading.keys["model.mtp"] = len(depths)
    names = "mtp_hybrid_override_pattern", "hybrid_layer_pattern", "hybrid_override_pattern"
    reading.set_key("model.ssm.mtp_pattern", depths[0], *names)


def write_shape(keys: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Writes the settings of the shape that rows alone do not say. names: of settings whose names differ between the
    programs."""
    settings: dict[str, Any] = {}
    if "model.mla.kv_lora_rank" in keys:
        settings["multi_latent_attention"] = True
    if keys.get("model.qkv_bias") and not keys.get("model.mlp_bias"):
        settings[names["qkv_bias"]] = True
    if keys.get("model.norm") in ("layernorm1p", "rmsnorm1p"):
        settings[names["layernorm1p"]] = True
    if keys.get("model.norm") == "rmsnorm1p":
        settings["normalization"] = "RMSNorm"
    if keys.get("model.window"):
        settings["window_size"] = f"{keys['model.window'] - 1},0"
        full = keys.get("model.full_every")
        if isinstance(full, int) and full:
            settings["window_attn_skip_freq"] = full
        elif full:
            flags = ",".join(str(int(layer not in full)) for layer in range(keys["model.layers"]))
            settings["window_attn_skip_freq"] = f"[{flags}]"
    if keys.get("model.moe.shared_ffn"):
        settings["moe_shared_expert_intermediate_size"] = keys["model.moe.shared_ffn"]
    layers, dense, every = (
        keys.get(f"model.{key}", usual) for key, usual in (("layers", 0), ("moe.first_dense", 0), ("moe.every", 1))
    )
    if "model.moe.experts" in keys and dense:
        settings["moe_layer_freq"] = f"([0]*{dense}+[1]*{layers - dense})"
    elif "model.moe.experts" in keys and every > 1:
        settings["moe_layer_freq"] = every
    if "model.ssm.pattern" in keys:
        depths = keys.get("model.mtp", 0) * [keys.get("model.ssm.mtp_pattern", "")]
        settings["hybrid_layer_pattern"] = "/".join([keys["model.ssm.pattern"], *depths])
    return settings


def omit_derived(keys: Mapping[str, Any]) -> Keys:
    """Returns the keys without widths that a model does not have: those of heads under latent attention."""
    derived = {"model.head_dim", "model.kv_heads"} if "model.mla.kv_lora_rank" in keys else set()
    if keys.get("model.kv_heads") == keys.get("model.heads"):
        derived.add("model.kv_heads")
    return {key: value for key, value in keys.items() if key not in derived}
