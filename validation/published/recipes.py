"""What public recipes and launchers set and the tables of their runs do not print.

What a program's recipes set for any job is in its profile (`simulator.job.recipe`); here is what launchers of sources
set. Overlaps: see `LAUNCHED_OVERLAP` and `NO_SUCH_OVERLAP`; other fields: see `LAUNCHED`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshcast.hardware.load import load
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.programs.nemo import SAMPLE_TOKENS
from meshcast.simulator.ir.graph_parts import CudaGraphs
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.job.program_rules import CONDITIONS
from meshcast.simulator.job.recipe import NO_RECIPE, NestedFields, RecipeFacts, find_recipe, name_as_recipes, name_mixer
from meshcast.simulator.models.load import ModelSizes
from meshcast.validation.published.releases import month_of
from meshcast.validation.published.rows import PublishedRun, Spec
from meshcast.validation.published.stacks import framework, stack

LAUNCHED_OVERLAP: dict[str, dict[str, bool]] = {
    # MooreThreads/SimuMax @1b8ca90b, simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh and
    # run_pretrain_deepseekv2.sh pass neither --overlap-grad-reduce nor --overlap-param-gather, which are off by
    # default; docs/b200/b200_real_repro_guide.md: "a non-overlap contract", with --no-overlap-p2p-communication.
    # --overlap-moe-expert-parallel-comm is off by default, too.
    "simumax": {"dp": False, "pp": False, "ep": False},
}
"""Which communication the launchers of a source overlap, by source and axis, where its runs do not say so."""

BRIDGE = "megatron-bridge"
"""Framework whose recipes with experts capture all but these in graphs, unless dispatches overlap."""

ALWAYS = "always"
NO_SUCH_OVERLAP = {
    # The megatron/ of 2021 to 2023, and that of Megatron-DeepSpeed, have no GEMMs that are split for a collective:
    # userbuffers came with Transformer Engine.
    "megatron-lm-2021": {"tp": ALWAYS},
    "megatron-deepspeed": {"tp": ALWAYS},
    # CHANGELOG.md of NVIDIA/Megatron-LM: --overlap-moe-expert-parallel-comm comes after core 0.12 of 2025-05.
    "megatron-core": {"ep": "2025-06"},
    "nemo": {"ep": "2025-06"},
}
"""Month before which a program has no way to overlap the communication of an axis; `ALWAYS`: it never got any."""


EAGER_LOSS = {"forward": 38, "backward": 14}
"""Bytes per logit of Megatron's cross-entropy without fusion, every kernel by itself: in fp32 a copy (6), the maximum
(4), the difference in place (8), the exponential in place (8), its sum (4) and the quotient in place (8); backward the
product with the gradient in place (8) and its cast to 16 bits (6). NVIDIA/Megatron-LM @86d5aa5d77 of 2024-07,
megatron/core/tensor_parallel/cross_entropy.py, class VocabParallelCrossEntropy."""

ONE_KERNEL = {"forward": {"kernels": 1, "traffic": 1}, "backward": {"kernels": 1, "traffic": 1}}
FUSED = {"rms-norm": {**ONE_KERNEL, "elementwise": False}, "rope": ONE_KERNEL}
IN_FP32 = {"products": "fp32"}

LAUNCHED_KERNELS: dict[str, dict[str, object]] = {
    # foundation-model-stack/fms-acceleration @876e2ed, scripts/benchmarks/scenarios.yaml and accelerate.yaml: no mixed
    # precision but in `AUTOCAST`, so nothing converts the operands of adapters, which PEFT keeps in fp32.
    "none": {"adapters": IN_FP32},
    # The same with kernels of Unsloth, whose norm and RoPE are a kernel each and whose cross-entropy makes the
    # gradient in place of the fp32 logits (plugins/fused-ops-and-kernels/src/fms_acceleration_foak/kernels/unsloth).
    # Its adapters are PEFT's (framework_plugin_fast_kernels.py: fused_lora "only required for quant-peft").
    "foak-fast-kernels": {
        "adapters": IN_FP32, "eager": FUSED, "loss": {"forward": 14, "backward": 14, "kept": 4, "peak": 8}
    },
    # The same, scripts/benchmarks/scenarios-liger.yaml: fused linear and cross-entropy of Liger.
    "foak-fast-kernels-liger": {
        "adapters": IN_FP32, "eager": FUSED,
        "loss": {"forward": 2, "backward": 2, "kept": 0, "peak": 0, "chunk_tokens": "liger"},
    },
}  # fmt: skip
"""Kernels that a launcher sets, by the set of kernels that a run names (`PublishedRun.kernel_plugin`)."""

BIGCODE_LOSS = {"forward": 8, "backward": 14, "kept": 2, "peak": 6}
"""Loss of GPTBigCodeForCausalLM in Transformers 4.48.1, whose logits stay in 16 bits: their shifted copy (4) and the
log-softmax (4); backward zeros (2), the gradient of the log-softmax (6), and its copy into zeros (6)."""


LOGITS_HELD = "2024-10", {"forward": 14, "backward": 14, "kept": 4, "peak": 10}
"""Loss of foak-fast-kernels since Transformers 4.46: the logits in 16 bits stay in the frame of the model during the
loss, which makes those in fp32 and their shifted copy (`FastForCausalLMLoss`)."""


AUTOCAST = "refs/a100_80gb_liger.csv"
"""The table whose runs have mixed precision (scripts/benchmarks/scenarios-liger.yaml: ``bf16: True``), which converts
the operands of adapters; scenarios.yaml and scenarios-granite.yaml have none."""


def launched_kernels(row: PublishedRun) -> dict[str, object]:
    """Returns the kernels that the launcher of a run sets, as changes of its framework."""
    kernels = LAUNCHED_KERNELS.get(row.kernel_plugin, {})
    if AUTOCAST in row.citation:
        kernels = {name: traits for name, traits in kernels.items() if name != "adapters"}
    if kernels and row.model_name.startswith("SantaCoder"):
        return kernels | {"loss": BIGCODE_LOSS}
    since, loss = LOGITS_HELD
    held = row.kernel_plugin == "foak-fast-kernels" and (month_of(row, framework(row.spec.stack)) or "") >= since
    return kernels | ({"loss": loss} if held else {})


def main_weights(row: PublishedRun) -> str | None:
    """Returns the number format of the main weights of a run; None if nothing says it.

    Where a run has mixed precision, Accelerate holds the trained weights that FSDP shards in fp32, whatever they were
    loaded in (`prepare_model` of src/accelerate/accelerator.py, v0.34.2 to v1.0.1). The table says so, too: after
    fine-tuning Llama 3 8B two GPUs hold 64.26 GB each, 16 bytes a parameter, and one GPU without FSDP 48.20, 6 bytes.
    """
    spec = row.spec
    upcast = AUTOCAST in row.citation and spec.lora is None and (spec.sharding or "").startswith("fsdp-")
    return "fp32" if upcast else spec.main_weights


LAUNCHED_DROPOUT = frozenset(LAUNCHED_KERNELS)
"""Sets of kernels whose runs have adapters with dropout: scripts/benchmarks/scenarios.yaml of fms-acceleration,
lora_dropout: 0.1."""

EAGER_LOSS_UNTIL = {
    # --cross-entropy-loss-fusion is off by default (megatron/core/model_parallel_config.py), and new of 2024-06.
    "megatron-core": ALWAYS,
    # No recipe of NVIDIA/NeMo-Framework-Launcher sets cross_entropy_loss_fusion; GPTConfig of NeMo 2 does.
    "nemo": "2024-11",
}
"""Month before which a program does not fuse the loss unless a run says so; `ALWAYS`: it still does not."""

NEMO_1_UNTIL = "2024-11"
"""Month before which runs of NeMo are of NeMo 1 and its launcher."""

GPT_DROPOUT = 0.1
"""Dropout of GPT-3 on hidden states and attention: NVIDIA/NeMo-Framework-Launcher, launcher_scripts/conf/training/gpt3,
all files (those of Llama and Nemotron have none); the default of Megatron-LM, megatron/training/arguments.py."""


@dataclass(frozen=True)
class RecipeSettings:
    """What a public launcher sets for some runs of a program.

    stack, kind: program and class of the runs; model: its name as sources print it, None for any.
    until: month before which this was so.
    spec: fields of a spec that its runs do not state.
    """

    stack: str
    kind: str
    model: str | None
    until: str
    spec: Mapping[str, Any]

    def includes(self, row: PublishedRun) -> bool:
        """Returns whether the runs of this launcher include a run."""
        if (row.spec.stack, row.spec.kind) != (self.stack, self.kind) or self.model not in (None, row.model_name):
            return False
        return (month_of(row, framework(row.spec.stack)) or self.until) < self.until


SELECTIVE: dict[str, Any] = {"kind": "selective"}

LAUNCHED = (
    # NVIDIA/NeMo-Framework-Launcher, tags 24.01 to 24.09, launcher_scripts/conf/peft/llama/sft.yaml: grad_sync_dtype.
    RecipeSettings("nemo", "sft-packed", None, "2024-11", {"grad_dtype": "bf16"}),
    # The same, tags 24.01 to 24.07, training/gpt3/175b_fp8.yaml: grad_sync_dtype. All runs in question are in 8 bits.
    RecipeSettings("nemo", "dense", "GPT3-175B", "2024-11", {"grad_dtype": "bf16"}),
    # The same, tags 24.07 and 24.09, training/nemotron/nemotron_340b.yaml: grad_sync_dtype, activations_checkpoint_
    # granularity. The latter is null in all other files of training/ and peft/llama/.
    RecipeSettings("nemo", "dense", "Nemotron4-340B", "2024-11", {"grad_dtype": "bf16", "recompute": SELECTIVE}),
    *(
        RecipeSettings("nemo", kind, None, "2024-11", {"recompute": {"kind": "none"}})
        for kind in ("dense", "lora", "sft-packed")
    ),
    # NVIDIA/dgxc-benchmarking @143b90dd, paxml/configure.sh: FSDP=16 nodes, of eight GPUs each (DCN_MESH_SHAPE times
    # the ICI_MESH_SHAPE of paxml's Synthetic175B).
    RecipeSettings("jax", "dense", "GPT3-175B", "2025-01", {"shard_group": 128}),
    # The same, tags v24.11.1 and v25.02.02, maxtext/configure.sh: remat_policy=custom with query_proj, key_proj,
    # value_proj, out_proj on the device; save_qkv_proj. In bf16 the former also keeps mlpwo, which no gradient reads.
    RecipeSettings(
        "jax", "dense", "Llama2-70B", "2025-01", {"recompute": SELECTIVE | {"modules": ["save_qkv_out_proj"]}}
    ),
    RecipeSettings("jax", "dense", "Llama3-70B", "2025-05", {"recompute": SELECTIVE | {"modules": ["save_qkv_proj"]}}),
)
"""Fields that launchers set and the tables of their runs leave open."""

PACKS_SQUAD = ("nemo",)
"""Programs whose runs on packed samples are of SQuAD, each sample with attention of its own: NVIDIA/NeMo, scripts/
performance/utils.py (prepare_squad_dataset), NVIDIA/dgxc-benchmarking v25.02.02, llama3/finetuning. Those of
Megatron-Bridge are of random tokens without samples (@067f987df, scripts/performance/argument_parser.py: data mock)."""

DISPATCHED_WITH = {"dualpipe": "deepseek"}
"""Dispatchers by the schedules that they were published with: in 8 bits to at most four nodes, copied by 20
multiprocessors (arXiv 2412.19437, sections 3.2.1 and 3.2.2)."""

EVENED_BY_BIAS = ("DeepSeek-V3",)
"""Models whose router has a bias that follows the loads of experts, where they were trained (arXiv 2412.19437, section
2.1.2); rows say `natural` of every trained router."""


def packed_samples(row: PublishedRun) -> int | None:
    """Returns the tokens of the samples that are packed into a sequence of the run; None: sequences are whole."""
    return SAMPLE_TOKENS["squad"] if row.spec.kind == "sft-packed" and row.spec.stack in PACKS_SQUAD else None


@dataclass(frozen=True)
class Misprint:
    """A plan of a published table that contradicts the table itself, or the recipe of its release.

    runs: their ids, a regular expression.
    spec: fields of the spec with what ran, in place of what the table prints.
    fields: names of these fields, as `assumed` lists them.
    """

    runs: str
    spec: Mapping[str, object]
    fields: tuple[str, ...]


LAUNCHED_GB300 = {"mesh": {"pp": 4, "dp": 16, "vpp": 5}, "batch": {"micro": 1}, "schedule": "interleaved"}

MISPRINTS = (
    # docs/performance-summary-archive.md @067f987df, 26.02.01: micro-batches of 2, no virtual stages, NVFP4 without a
    # pipeline: 549 and 377 GiB of 278. The recipe of that release (v0.3.1, scripts/performance/configs/llama/
    # llama3_workload_base_configs.py, LLAMA3_70B_PRETRAIN_CONFIG_GB300_FP8_MX_V2 and _NVFP4_V2), and the tables of
    # 26.02 and 26.04, have pp 4, vp 5, micro-batches of 1.
    Misprint(
        r"mbridge-26\.02\.01-llama3-70b-gb300-(nvfp4|mxfp8)-",
        {**LAUNCHED_GB300, "shard_group": 16, "pipeline_split": "even"},
        ("mesh.vpp", "batch.micro", "schedule"),
    ),
    # The same, 25.09: the micro-batch of 2 is that of the row's other precision, with FSDP. In parentheses it prints 16
    # accumulations, which 128 sequences over 8 ranks have with micro-batches of 1.
    Misprint(r"mbridge-25\.09-llama3-70b-gb200-fp8-n64-gb128-alt$", {"batch": {"micro": 1}}, ("batch.micro",)),
    # The same, 25.11: micro-batches of 4 in 2 accumulations are those of B200, and make 128 sequences of 512 over 16
    # ranks. The recipe of that release (v0.2.0, configs/gpt_oss/workload_base_configs.py,
    # GPT_OSS_120B_H100_BF16_BASE_CONFIG) has micro-batches of 1, and recomputes norms and activations of experts.
    Misprint(
        r"mbridge-25\.11-gpt-oss-120b-h100-bf16-",
        {"batch": {"micro": 1}, "recompute": {"kind": "selective", "modules": ["layernorm", "moe_act"]}},
        ("batch.micro", "recompute.kind", "recompute.modules"),
    ),
    # Tables do not print the overlap of tensor ranks; runs have that of scripts/performance/utils/overrides.py. Those
    # in 4 bits have none: configs/llama3/llama3_llm_pretrain.py and configs/llama31/llama31_llm_pretrain.py of v0.2.0,
    # and those of each later release, set tp_comm_overlap = False where the precision is nvfp4.
    Misprint(r"mbridge-.*-nvfp4-", {"overlap": {"tp": False}}, ()),
)
"""What tables misprint, fields without which the run would not have fitted, and what other recipes than the run's say.
"""

FILLED_STAGES = 16
"""Most stages that the recipes' table of layouts fills in turn."""


@dataclass(frozen=True)
class LaunchedSettings:
    """What the recipe or the launcher of a run sets.

    plan: keys of a plan in short form.
    traits: of the framework, nested as in its profile.
    dispatcher: expert scheme; empty: all-to-all.
    overlaps: whether dispatches of a micro-batch overlap with another.
    graphs: `Framework.cuda_graphs`.
    context: scheme of context parallelism, if the run has its own.
    """

    plan: NestedFields
    traits: NestedFields
    dispatcher: str
    overlaps: bool
    graphs: CudaGraphs
    context: str = ""


OUTSIDE_EXPERTS: CudaGraphs = ("attn", "moe_router", "moe_preprocess")
"""Modules that are CUDA graphs in most recipes of Megatron-Bridge with experts that have any."""

A2A_SINCE, ULYSSES = "2024-10", "sequence/ulysses"
"""MLPerf's Llama 2 70B LoRA exchanges heads (``cp_comm_type: a2a``) on Blackwell: NVIDIA's implementations since that
of B200 in v4.1 (mlcommons/training_results_v4.1, v5.0, v5.1, NVIDIA/benchmarks/llama2_70b_lora, in conf/ the file
megatron_gpt_peft_tuning_config.yaml), and those of other submitters that have its code. Implementations for Hopper and
for AMD do not have the option, and neither has any for the other models."""


def _context_scheme(row: PublishedRun) -> str:
    """Returns the kind of context parallelism of a run, as the code of its submission says; empty if that is not
    known."""
    if (row.spec.stack, row.spec.kind) != ("mlperf-nemo", "lora"):
        return ""
    if load("gpus", row.spec.gpu or "").architecture != "blackwell":
        return ""
    return ULYSSES if (month_of(row, framework(row.spec.stack)) or "") >= A2A_SINCE else ""


def launched_overlap(row: PublishedRun) -> dict[str, bool]:
    """Returns whether the launcher of a run overlaps the communication of an axis, where that is known, or its program
    can."""
    stack, month = row.spec.stack, month_of(row, framework(row.spec.stack)) or ""
    limits = NO_SUCH_OVERLAP.get(stack, {})
    never = {axis: False for axis, until in limits.items() if until == ALWAYS or "" < month < until}
    return never | LAUNCHED_OVERLAP.get(row.source, {})


def has_eager_loss(row: PublishedRun) -> bool:
    """Returns whether the loss of a run is not fused, see `EAGER_LOSS`."""
    until = EAGER_LOSS_UNTIL.get(row.spec.stack, "")
    month = month_of(row, framework(row.spec.stack)) or ""
    return not row.fuses_loss and (until == ALWAYS or "" < month < until)


def launched_dropout(row: PublishedRun) -> tuple[float | None, bool]:
    """Returns the dropout of a run that its program's launcher or default says, None for none, and whether it is
    assumed.

    Megatron-LM has dropout unless an argument turns it off, which all scripts of models with RMS norms do.
    """
    spec, month = row.spec, month_of(row, framework(row.spec.stack)) or ""
    if spec.stack == "nemo" and "" < month < NEMO_1_UNTIL and row.model_name.startswith("GPT3"):
        return GPT_DROPOUT, False
    if spec.stack == "megatron-core" and spec.model.norm == "layernorm":
        return GPT_DROPOUT, True
    return None, False


def launched_attention(row: PublishedRun) -> str:
    """Returns the library of attention that the launcher of a run sets; empty if it leaves the choice.

    NVIDIA/dgxc-benchmarking v24.11.1, nemo_megatron/launch.sh: NVTE_FUSED_ATTN=0, without which Transformer Engine
    would take cuDNN on Hopper.
    """
    is_gpt = (row.source, row.spec.stack, row.model_name) == ("dgxc", "nemo", "GPT3-175B")
    return "flash-2" if is_gpt and "" < (month_of(row, "nemo") or "") < NEMO_1_UNTIL else ""


def misprinted_fields(row: PublishedRun) -> tuple[str, ...]:
    """Returns the fields of a run that its table misprints."""
    return tuple(field for misprint in MISPRINTS if re.match(misprint.runs, row.id) for field in misprint.fields)


def correct_misprints(row: PublishedRun) -> PublishedRun:
    """Returns the run with what ran in place of what its table misprints."""
    spec = row.spec
    for misprint in MISPRINTS:
        if re.match(misprint.runs, row.id):
            inner = {field: value for field, value in misprint.spec.items() if isinstance(value, Mapping)}
            changed = {field: getattr(spec, field).model_copy(update=value) for field, value in inner.items()}
            spec = spec.model_copy(update={**misprint.spec, **changed})
    return row if spec is row.spec else row.model_copy(update={"spec": spec})


def fill_launched(row: PublishedRun) -> PublishedRun:
    """Returns the run with the fields that its launcher sets, where it does not state them."""
    settings: dict[str, Any] = {}
    for launcher in LAUNCHED:
        if launcher.includes(row):
            settings = {**launcher.spec, **settings}
    open_: dict[str, Any] = {}
    for field, value in settings.items():
        stated = getattr(row.spec, field)
        if isinstance(value, Mapping):
            inner = {key: setting for key, setting in value.items() if getattr(stated, key) is None}
            open_[field] = stated.model_copy(update=inner)
        elif stated is None:
            open_[field] = value
    return row.model_copy(update={"spec": row.spec.model_copy(update=open_)}) if open_ else row


def takes_recipe(row: PublishedRun, name: str) -> bool:
    """Returns whether a framework is that of the program of a run, whose recipes then count, and no substitute."""
    program = row.spec.stack
    return name == framework(program) and (name == program or bool(stack(program).near))


def launched_settings(row: PublishedRun, name: str) -> LaunchedSettings:
    """Returns what the recipe of a run sets. name: of its framework."""
    spec, defaults = row.spec, stack(row.spec.stack)
    recipe = find_recipe(name, _facts_of(row, name)) if takes_recipe(row, name) else NO_RECIPE
    plan, traits = {**recipe.plan, **defaults.plan}, recipe.traits
    profile = load_framework(name, traits, month_of(row, name))
    schedule = plan.get("schedule")
    overlaps = isinstance(schedule, Mapping) and bool(schedule.get("overlap_passes")) and can_overlap_passes(spec)
    if spec.overlap.ep is not None:
        overlaps = bool(spec.model.moe and spec.overlap.ep)
    graphs = profile.cuda_graphs if defaults.cuda_graphs is None else defaults.cuda_graphs
    if spec.cuda_graphs is not None:
        graphs = spec.cuda_graphs and (graphs or (OUTSIDE_EXPERTS if spec.model.moe and name == BRIDGE else True))
    if graphs is True and spec.model.moe and name == BRIDGE and not (overlaps and row.token_dispatcher != "deepep"):
        graphs = OUTSIDE_EXPERTS
    if graphs is not True:
        traits = {key: value for key, value in traits.items() if key != "attention_library"}
    stated = row.token_dispatcher or str(plan.get("ep_scheme") or "")
    dispatcher = stated or DISPATCHED_WITH.get(spec.schedule or "", "")
    return LaunchedSettings(plan, traits, dispatcher, overlaps, graphs, _context_scheme(row))


def can_overlap_passes(spec: Spec) -> bool:
    """Returns whether Megatron-Core lets passes of micro-batches overlap; stages whose chunks are not stated have
    several."""
    degrees = {"pp": spec.width("pp"), "ep": spec.width("ep"), "virtual_stages": spec.mesh.vpp or 0}
    return not CONDITIONS["overlapped-passes"].check({**degrees, "overlap_passes": True, "recomputation": ""})


def _facts_of(row: PublishedRun, name: str) -> RecipeFacts:
    """Returns what decides which settings of recipes a run gets. name: of its framework."""
    spec, moe = row.spec, row.spec.model.moe or {}
    sizes = spec.model.layers or 0, spec.model.hidden or 0, spec.model.heads or 0
    model = ModelSizes(*sizes, moe.get("experts", 0), moe.get("top_k", 0))
    return RecipeFacts(
        month=month_of(row, name) or "",
        model=name_as_recipes(name, row.model_name, model),
        experts=spec.model.moe is not None,
        mixer=name_mixer(latent=spec.model.mla, state_space=spec.model.ssm),
        gpu=spec.gpu or "",
        compute=spec.precision or "",
        mode="lora" if spec.kind == "lora" else "full",
        degrees={"domain": spec.domain or 1, "pp": spec.width("pp"), "ep": spec.width("ep")},
    )


def uneven_layers(spec: Spec, stages: int) -> list[int]:
    """Divides layers over stages that have not the same number of them.

    Recipes of Megatron-Bridge fill the stages in turn, and the last has the rest: DeepSeek-V3 and Kimi-K2 on
    4, 8 and 16 stages (`_get_deepseek_v3_pipeline_layout`, `_get_kimi_k2_pipeline_layout`). Otherwise layers are spread
    as evenly as possible, where the embedding, the loss and each multi-token-prediction layer (in the last stage) count
    as a layer.
    """
    layers, further = spec.model.layers or 0, spec.model.mtp or 0
    if spec.stack == "megatron-bridge" and spec.model.moe and stages <= FILLED_STAGES:
        most = -(-layers // stages)
        return [min(most, max(0, layers - stage * most)) for stage in range(stages)]
    each, more = divmod(layers + 2 + further, stages)
    layers_by_stage = [each + (stage < more) for stage in range(stages)]
    layers_by_stage[0] -= 1
    layers_by_stage[-1] -= 1 + further
    if layers_by_stage[-1] < 0:  # embedding and loss fill more than a stage
        layers_by_stage[1:3] = [layers_by_stage[1] + layers_by_stage[-1], *layers_by_stage[2:3]]
        layers_by_stage[-1] = 0
    return layers_by_stage
