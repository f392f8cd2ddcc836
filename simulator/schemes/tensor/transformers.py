"""Hugging Face Transformers tensor parallelism (`tp_plan="auto"`): Megatron's shards, layer by layer, without overlap.

A plan names the layers of a model: `colwise` (queries, keys, values, gate, up) and `rowwise` (output projections). Each
is parallel by itself. So forward a layer has Megatron's two all-reduces, behind the rowwise layers; backward it has
another behind every colwise layer, not a single all-reduce for all layers that read the same input, and the results are
added. The output layer is colwise, too, and its logits are gathered (`colwise_rep`): every rank computes the loss over
the whole vocabulary, and holds all logits. Embedding and norms are replicated.

    x --norm--> [q k v | attention | o] --all-reduce--> + --norm--> [gate up | act | down] --all-reduce--> +
    backward    q, k and v: all-reduce each              backward    gate and up: all-reduce each

A rank sends 2 (p-1)/p b s h elements for every all-reduce: 2 forward and, with c colwise layers, c backward; c = 5 with
a gated MLP and 4 without. Collectives are waited for where a layer ends, and gradients of weights are computed before
those of its input are summed.

Not modelled: the separate kernels of layers that read the same input, which are a single GEMM here;
    `sequence_parallel`.

References: https://github.com/huggingface/transformers, src/transformers/integrations/tensor_parallel.py and, for the
plan, models/llama/configuration_llama.py; shards: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshcast.simulator.ir.capabilities import GathersLogits, PadsVocabulary
from meshcast.simulator.ir.modules import Module, Operator, Unit
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import COMPUTE, Collective, Fragment, Memory, Op
from meshcast.simulator.ir.scheme import ClosedForm, LowerModule, Paper, TensorScheme
from meshcast.simulator.ir.settings import LayerSetting
from meshcast.simulator.lowering.rewrite import Rewrite, working_predecessors


class Transformers(TensorScheme, PadsVocabulary, GathersLogits):
    paper = Paper("https://github.com/huggingface/transformers", "Transformers: tensor parallelism", 2024)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.framework is not None:  # its collectives stay where they are issued, whatever the framework overlaps
            overlap = self.framework.overlap.model_copy(update={"gradients": False})
            self.framework = replace(self.framework, overlap=overlap)

    @property
    def vocabulary_axes(self) -> tuple[str, ...]:
        return ()

    def layouts(self, operator: Operator) -> str | None:
        if operator.name == "head":
            return "v"
        return next((dim for dim in ("a", "f") if operator.has(dim)), None)

    def lower(self, module: Module, inner: LowerModule) -> Fragment:
        fragment = inner(module)
        if not isinstance(module, Unit):
            return fragment
        rewrite, layers = Rewrite(fragment), {f"d{layer.name}": layer for layer in module.operators()}
        for op in fragment.backward:
            if isinstance(op.work, Collective) and op.work.operation == "all_reduce" and op.stream == self.family:
                makers = (layers.get(gradient.name) for gradient in working_predecessors(op))
                count = max((len(layer.outs) for layer in makers if isinstance(layer, Linear)), default=1)
                if count > 1:
                    self._reduce_each(rewrite, op, op.work, count)
        return rewrite.apply()

    def _reduce_each(self, rewrite: Rewrite, op: Op, work: Collective, count: int) -> None:
        """Replaces the all-reduce behind several colwise layers by an all-reduce for each of them, and adds what they
        return."""
        sums = [replace(op, name=f"{op.name} {i}", after=list(op.after)) for i in range(count)]
        add = Memory("add", 2 * work.nbytes, work.nbytes)
        ops = [sums[0]]
        for summand in sums[1:]:
            added = replace(op, name=f"add {op.name}", stream=COMPUTE, work=add, after=[ops[-1], summand])
            ops += [summand, added]
        rewrite.swap(op, ops)

    def closed_forms(self, setting: LayerSetting) -> Iterable[ClosedForm]:
        t, b, s, h, a = setting.t, setting.b, setting.s, setting.h, setting.a
        sent = 2 * (t - 1) / t * b * s * h * 2
        yield ClosedForm("sent_per_layer", (2 + 3 + 1) * sent, "rowwise forward; queries, keys, values and up backward")
        activations = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
        yield ClosedForm("activations_per_layer", activations, "as Megatron's: arXiv 2205.05198, equation 2")
