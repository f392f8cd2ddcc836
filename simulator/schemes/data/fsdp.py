"""Fully sharded data parallelism: weights, gradients and optimizer states rest cut; a unit is whole while it computes.

A unit is a transformer layer, the embedding, or the output layer with its loss. Before its forward pass its weights are
all-gathered, behind it they are freed; before its backward pass they are gathered again, and behind that its gradients
are reduce-scattered, in every micro-batch. The next unit's weights are gathered while one computes, so two units are
whole at a time.

    forward    gather 1 | gather 2   gather 3   ...         backward   ... gather 2    gather 1
               ........ | compute 1  compute 2  ...                    ... compute 3   compute 2   compute 1
                                                                                scatter 3   scatter 2   scatter 1

3 (N-1)/N M bytes sent per rank and micro-batch for M bytes of weights and of gradients. 16/N bytes a parameter at rest:
the sharded weights are those that the optimizer updates, in its format.

References: Zhao et al. 2023, arXiv 2304.11277, section 3; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv 1910.02054.
"""

from collections.abc import Iterable

from simulator.ops import Chain
from simulator.scheme import Around, Law, Paper
from simulator.sharding import DataScheme
from simulator.sites import Stage
from simulator.units import in_units


class FSDP(DataScheme):
    paper = Paper("arXiv:2304.11277", "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023)
    shards = ("optimizer", "gradients", "parameters")

    def lower_stage(self, stage: Stage, inner: Around) -> Chain:
        return in_units(self, inner(stage), ahead=self.habits.overlap.dp)

    def laws(self, setting) -> Iterable[Law]:  # type: ignore[no-untyped-def]
        n = setting.n
        moved = 2 * setting.weight_bytes + setting.grad_bytes
        yield Law("sent_per_step", (n - 1) / n * moved, "arXiv 1910.02054, section 7.2.2: 3 times the parameters")
        if n > 1:
            yield Law("state_bytes_per_parameter", 16 / n, "section 2: 4 + 4 + 8 bytes, with sharded fp32 weights")
