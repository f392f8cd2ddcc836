"""Optimizers by the bytes of their states, under the names that training programs on PyTorch give them.

The engine updates with Adam, whose two moments have one format. An optimizer with fewer bytes of states is forecast as
Adam with moments in bf16, and the import says by how many bytes a trained parameter the memory errs.

Sources: huggingface/transformers v5.24.0, src/transformers/training_args.py (OptimizerNames) and trainer_optimizer.py;
bitsandbytes for states in 8 bits; axolotl-ai-cloud/axolotl v0.19.0, src/axolotl/utils/schemas/enums.py
(CustomSupportedOptimizers); deepspeedai/DeepSpeed v0.19.8, deepspeed/runtime/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshcast.simulator.formats.launch.reading import Reading
from meshcast.simulator.formats.launch.table import Stated

ADAM_BYTES = 8
"""Bytes of the states of a parameter with Adam in fp32."""

SMALL_BYTES = 4
"""The same with moments in bf16."""


PROJECTIONS = "the projections of the gradients are left out"
PAGED = "pages of its states that move to host memory are forecast on the GPU"


class OptimizerStates(NamedTuple):
    """States of an optimizer.

    nbytes: of a trained parameter.
    work: what else it does, which the update of Adam does not.
    """

    nbytes: float
    work: str = ""


ROWS = (
    ("adam adamw adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_hf", OptimizerStates(8)),
    ("adamw_apex_fused adamw_anyprecision fused_adam fused_adamw fusedadam fusedadamw cpuadam", OptimizerStates(8)),
    ("deepspeedcpuadam stable_adamw schedule_free_adamw", OptimizerStates(8)),
    ("paged_adamw paged_adamw_32bit", OptimizerStates(8, PAGED)),
    ("schedule_free_radam optimi_adamw adopt_adamw adamc flash_adam flash_adamw", OptimizerStates(8)),
    ("adamw_8bit adam_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit paged_adam_8bit", OptimizerStates(2)),
    ("ao_adamw_8bit ao_adamw_fp8 adamw8bit pagedadamw8bit", OptimizerStates(2)),
    ("adamw_torch_4bit ao_adamw_4bit", OptimizerStates(1)),
    ("lion lion_32bit paged_lion_32bit fusedlion deepspeedcpulion flash_lion adam_mini", OptimizerStates(4)),
    ("lion_8bit paged_lion_8bit rmsprop_bnb_8bit", OptimizerStates(1)),
    ("rmsprop rmsprop_bnb rmsprop_bnb_32bit adagrad deepspeedcpuadagrad", OptimizerStates(4)),
    ("sgd schedule_free_sgd flash_sgd flash_sgdw adafactor came came_pytorch lomo adalomo badam", OptimizerStates(0)),
    ("ademamix paged_ademamix_32bit grokadamw", OptimizerStates(12)),
    ("ademamix_8bit paged_ademamix_8bit", OptimizerStates(3)),
    ("muon flash_muon normuon dion", OptimizerStates(4, "the iterations that orthogonalise updates are left out")),
    ("galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise", OptimizerStates(1, PROJECTIONS)),
    ("galore_adamw_8bit_layerwise galore_adafactor_layerwise q_galore_adamw8bit", OptimizerStates(1, PROJECTIONS)),
    ("apollo_adamw apollo_adamw_layerwise galore apollo", OptimizerStates(1, PROJECTIONS)),
    ("lamb fusedlamb onebitadam zerooneadam onebitlamb", OptimizerStates(8, "its compression and norms are left out")),
)
"""Names of optimizers in small letters, and their states."""

MOMENT_COPIES: Mapping[str, int] = {"adamw_torch": 1, "adamw_torch_fused": 0}
"""Copies of a moment that PyTorch's AdamW makes by implementation: foreach or fused."""

OPTIMIZERS: Mapping[str, OptimizerStates] = {name: states for names, states in ROWS for name in names.split()}


def read_optimizer(reading: Reading, *names: str) -> None:
    """Reads which optimizer updates the weights. names: of its setting."""
    word, stated = reading.take_word(*names).rpartition(".")[2], reading.take(*names)
    if word and stated is not None:
        set_optimizer(reading, stated, word, *names)


def set_optimizer(reading: Reading, stated: Stated, word: str, *names: str) -> None:
    """Sets the optimizer. stated: the setting that says so, one of `names`. word: its name in small letters."""
    states = OPTIMIZERS.get(word)
    if states is None:
        why = f"meshcast does not know how many bytes of states {word} has; Adam has 8 a trained parameter"
        reading.ask(stated, why, "precision.moments=fp32", "precision.moments=bf16")
        return
    if word in MOMENT_COPIES:
        reading.set_key("framework.set.update.moment_copies", MOMENT_COPIES[word], *names)
        return
    if states.nbytes == ADAM_BYTES and not states.work:
        reading.ignore(stated, "its states and its update are those of Adam, which is forecast")
        return
    kept = ADAM_BYTES if states.nbytes > SMALL_BYTES else SMALL_BYTES
    if kept == SMALL_BYTES:
        closest = f"closest to the states of {word}, {states.nbytes:g} bytes a parameter"
        reading.assume("precision.moments", "bf16", closest)
    difference = kept - states.nbytes
    errs = f"the forecast has {abs(difference):g} bytes a trained parameter {'more' if difference > 0 else 'less'}"
    why = f"Adam is forecast, with states of {kept} bytes a parameter where {word} has {states.nbytes:g}"
    work = f"; {states.work}" if states.work else ""
    reading.approximate(stated, why, (errs if difference else "the bytes are the same") + work)
