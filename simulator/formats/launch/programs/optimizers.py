"""Optimizers by the bytes of their states, under the names that training programs on PyTorch give them.

What an optimizer does beside reading and writing its states is left out, and the import says so.

Sources: huggingface/transformers v5.24.0, src/transformers/training_args.py (OptimizerNames) and trainer_optimizer.py;
bitsandbytes for states in 8 bits; axolotl-ai-cloud/axolotl v0.19.0, src/axolotl/utils/schemas/enums.py
(CustomSupportedOptimizers); deepspeedai/DeepSpeed v0.19.8, deepspeed/runtime/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated
from meshcast.simulator.job.optimizers import OptimizerName

PROJECTIONS = "the projections of the gradients are left out"
PAGED = "pages of its states move to host memory where the GPU is full; the forecast has all of them on the GPU"
LEFT_OUT = "its compression and norms are left out"
ROW_MOMENTS = "second moments of rows are left out"
IN_PLACE = "weights are updated during the backward pass, which frees their gradients; the forecast keeps all"


class OptimizerKind(NamedTuple):
    """What an optimizer is forecast as.

    optimizer: of a job, with states of as many bytes.
    work: what the forecast leaves out.
    """

    optimizer: OptimizerName
    work: str = ""


ROWS = (
    ("adam adamw adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf", OptimizerKind("adam")),
    ("adamw_apex_fused adamw_anyprecision fused_adam fused_adamw fusedadam fusedadamw cpuadam", OptimizerKind("adam")),
    ("deepspeedcpuadam stable_adamw schedule_free_adamw", OptimizerKind("adam")),
    ("paged_adamw paged_adamw_32bit", OptimizerKind("adam", PAGED)),
    ("schedule_free_radam optimi_adamw adopt_adamw adamc flash_adam flash_adamw", OptimizerKind("adam")),
    (
        "adamw_8bit adam_8bit adamw_bnb_8bit adamw_torch_8bit ao_adamw_8bit ao_adamw_fp8 adamw8bit",
        OptimizerKind("adam-8bit"),
    ),
    ("paged_adamw_8bit paged_adam_8bit pagedadamw8bit", OptimizerKind("adam-8bit", PAGED)),
    ("adamw_torch_4bit ao_adamw_4bit", OptimizerKind("adam-4bit")),
    ("lion lion_32bit fusedlion deepspeedcpulion flash_lion adam_mini", OptimizerKind("lion")),
    ("paged_lion_32bit", OptimizerKind("lion", PAGED)),
    ("lion_8bit rmsprop_bnb_8bit", OptimizerKind("lion-8bit")),
    ("paged_lion_8bit", OptimizerKind("lion-8bit", PAGED)),
    ("rmsprop rmsprop_bnb rmsprop_bnb_32bit adagrad deepspeedcpuadagrad", OptimizerKind("lion")),
    ("sgd schedule_free_sgd flash_sgd flash_sgdw", OptimizerKind("sgd")),
    ("adafactor came came_pytorch", OptimizerKind("adafactor")),
    ("lomo adalomo badam", OptimizerKind("sgd", IN_PLACE)),
    ("ademamix grokadamw", OptimizerKind("ademamix")),
    ("paged_ademamix_32bit", OptimizerKind("ademamix", PAGED)),
    ("ademamix_8bit", OptimizerKind("ademamix-8bit")),
    ("paged_ademamix_8bit", OptimizerKind("ademamix-8bit", PAGED)),
    ("muon flash_muon", OptimizerKind("muon")),
    ("normuon", OptimizerKind("muon", ROW_MOMENTS)),
    ("dion", OptimizerKind("dion")),
    ("soap", OptimizerKind("soap")),
    ("galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise", OptimizerKind("lion-8bit", PROJECTIONS)),
    (
        "galore_adamw_8bit_layerwise galore_adafactor_layerwise q_galore_adamw8bit",
        OptimizerKind("lion-8bit", PROJECTIONS),
    ),
    ("apollo_adamw apollo_adamw_layerwise galore apollo", OptimizerKind("lion-8bit", PROJECTIONS)),
    ("lamb fusedlamb onebitadam zerooneadam onebitlamb", OptimizerKind("adam", LEFT_OUT)),
)
"""Names of optimizers in small letters, and their kinds."""

MOMENT_COPIES: Mapping[str, int] = {"adamw_torch": 1, "adamw_torch_fused": 0}
"""Copies of a moment that PyTorch's AdamW makes by implementation: foreach or fused."""

WIDE = {
    *("paged_adamw", "paged_adamw_32bit", "lion_32bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"),
    *("ademamix", "paged_ademamix_32bit"),
}
"""Optimizers of bitsandbytes whose states have fp32, whatever the weights have (``init_state`` of bitsandbytes'
optim/optimizer.py)."""

OPTIMIZERS: Mapping[str, OptimizerKind] = {name: kind for names, kind in ROWS for name in names.split()}


def read_optimizer(reading: Reading, *names: str) -> None:
    """Reads which optimizer updates the weights. names: of its setting."""
    word, stated = reading.take_word(*names).rpartition(".")[2], reading.take(*names)
    if word and stated is not None:
        set_optimizer(reading, stated, word, *names)


def set_optimizer(reading: Reading, stated: Stated, word: str, *names: str) -> None:
    """Sets the optimizer.

    stated: the setting that says so, of `names`.
    word: its name in small letters.
    """
    kind = OPTIMIZERS.get(word)
    if kind is None:
        why = f"meshcast does not know which states {word} has; Adam has two moments, lion one"
        reading.ask(stated, why, "optimizer=adam", "optimizer=adam-8bit", "optimizer=lion")
        return
    if word in WIDE and reading.keys.get("precision.moments") == "bf16":
        reading.set_key("precision.moments", "fp32", *names)
    if word in MOMENT_COPIES:
        reading.set_key("framework.set.update.moment_copies", MOMENT_COPIES[word], *names)
        return
    if kind == OptimizerKind("adam"):
        reading.ignore(stated, "its states and its update are those of Adam, which is forecast")
        return
    reading.set_key(
        "optimizer", kind.optimizer, *(names or [name for name, entry in reading.stated.items() if entry is stated])
    )
    if kind.work:
        reading.approximate(stated, f"{word} is forecast with the states of {kind.optimizer}", kind.work)
