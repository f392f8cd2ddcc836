"""Megatron sequence parallelism: the activations that tensor parallelism replicates are sharded along the sequence.

Between the blocks of Megatron's tensor parallelism every activation is sharded along its positions, over the same
ranks. Each all-reduce becomes a reduce-scatter after a block and an all-gather before the next, with the same bytes;
norms, residuals and dropout shrink by p, in time and memory. The inputs of linears are kept as shards and all-gathered
again for the weight gradient where the framework does so: 8 or, with that, 10 (p-1)/p b s h elements per rank, layer
and micro-batch.

    x/p --norm--> all-gather [qkv | attention | proj] reduce-scatter --> + --norm--> all-gather [up | act | down]
    reduce-scatter

References: Korthikanti et al. 2022, arXiv 2205.05198, section 4 and equation 4; volume 10: arXiv 2405.07719, table 2.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import GathersLogits
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import Loss
from meshcast.simulator.ir.scheme import ClosedForm, Paper, TensorScheme
from meshcast.simulator.ir.settings import LayerSetting


class MegatronSP(TensorScheme, GathersLogits):
    paper = Paper("arXiv:2205.05198", "Reducing Activation Recomputation in Large Transformer Models", 2022)

    def layouts(self, operator: Operator) -> str | None:
        if isinstance(operator, Loss) and operator.whole_vocabulary:
            return None
        return next((dim for dim in ("a", "f", "v", "s") if operator.has(dim)), None)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        t, b, s, h, a = setting.t, setting.b, setting.s, setting.h, setting.a
        volume = 10 if setting.regather else 8
        yield ClosedForm("sent_per_layer", volume * (t - 1) / t * b * s * h * 2, "arXiv 2405.07719, table 2")
        if setting.regather:
            yield ClosedForm("activations_per_layer", s * b * h / t * (34 + 5 * a * s / h), "equation 4")
            yield ClosedForm("activations_per_layer_selective", 34 * s * b * h / t, "section 5")
            yield ClosedForm(
                "activations_per_layer_full", 2 * s * b * h / t, "section 5, with the input sharded along the sequence"
            )
