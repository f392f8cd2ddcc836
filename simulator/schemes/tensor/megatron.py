"""Megatron-LM tensor parallelism: heads, feed-forward columns and vocabulary rows are sharded.

The first linear of attention and MLP is sharded by columns (whole heads), the second by rows, so a block needs an
all-reduce forward and another backward: two of each per layer. A rank sends 8 (p-1)/p b s h elements per layer and
micro-batch. Norms, residuals and their activations are replicated on every rank. Embedding and output layer are sharded
along the vocabulary, and the loss is computed on the shards.

    x --norm--> [qkv | attention | proj] --all-reduce--> + --norm--> [up | act | down] --all-reduce--> +

References: Shoeybi et al. 2019, arXiv 1909.08053, section 3. Memory: Korthikanti et al. 2022, arXiv 2205.05198,
equation 2.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.capabilities import GathersLogits
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.operators import Loss
from meshcast.simulator.ir.scheme import ClosedForm, Paper, TensorScheme
from meshcast.simulator.ir.settings import LayerSetting


class Megatron(TensorScheme, GathersLogits):
    paper = Paper(
        "arXiv:1909.08053",
        "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
        2019,
    )

    def layouts(self, operator: Operator) -> str | None:
        if isinstance(operator, Loss) and operator.whole_vocabulary:
            return None
        return next((dim for dim in ("a", "f", "v") if operator.has(dim)), None)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        t, b, s, h, a = setting.t, setting.b, setting.s, setting.h, setting.a
        yield ClosedForm(
            "sent_per_layer", 8 * (t - 1) / t * b * s * h * 2, "section 3: four all-reduces of b s h elements"
        )
        yield ClosedForm(
            "activations_per_layer", s * b * h * (10 + 24 / t + 5 * a * s / (h * t)), "arXiv 2205.05198, equation 2"
        )
        yield ClosedForm("activations_per_layer_selective", s * b * h * (10 + 24 / t), "arXiv 2205.05198, section 5")
        yield ClosedForm("activations_per_layer_full", 2 * s * b * h, "arXiv 2205.05198, table 2")
