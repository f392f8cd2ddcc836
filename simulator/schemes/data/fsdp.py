"""PyTorch FSDP: weights, gradients and optimizer states are sharded; a unit is gathered only while it computes.

A unit is a transformer layer or several, the embedding, or the output layer with its loss. Its weights are all-gathered
before its forward pass and freed after it, all-gathered again before its backward pass, and its gradients
reduce-scattered after that, in every micro-batch. The weights of the next unit are all-gathered during the computation
of the current one, so two units are whole at a time.

    forward    gather 1 | gather 2   gather 3   ...         backward   ... gather 2    gather 1
               ........ | compute 1  compute 2  ...                    ... compute 3   compute 2   compute 1
                                                                              reduce-scatter 3   reduce-scatter 2 ...

With a second axis in `replicate`, groups of F ranks share one copy of the model (hybrid sharding): gradient shards that
were reduce-scattered in a group are then all-reduced among the R replicas, during the rest of the pass.

A rank sends 3 (F-1)/F M + 2 (R-1)/R M/F bytes per micro-batch for M bytes of weights and of gradients; a third of the
first term less where weights are not freed after the forward pass. 16/F bytes per parameter are stored: the sharded
weights are those that the optimizer updates, in its format. Every unit of `prefetch` is one more that is whole at a
time.

References: Zhao et al. 2023, arXiv 2304.11277, section 3; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv 1910.02054.
"""

from collections.abc import Iterable, Sequence

from pydantic import Field

from simulator.ir.ops import Param
from simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from simulator.schemes.data.shared.data_parallel import DataSetting
from simulator.schemes.data.shared.fully_sharded import ShardedScheme


class FSDP(ShardedScheme):
    paper = Paper("arXiv:2304.11277", "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023)
    names_axes = ("replicate",)

    class Options(SchemeOptions):
        replicate: str | None = None
        """The axis along which groups hold replicas of the model."""
        unit: int = Field(default=1, ge=1, strict=True)
        """Layers of a unit, where that many of one kind follow each other."""
        prefetch: int | None = Field(default=None, ge=0, le=3)
        """Units gathered during the computation of one. PyTorch's limit of two unused all-gathers is 1, its default.
        Default: 1 where the framework overlaps, else 0.
        """
        backward_prefetch: bool = True
        """Off: in the backward pass a unit is gathered after the reduce-scatter of the one before."""
        reshard: bool = True
        """Off: weights stay gathered from the forward to the backward pass, with one all-gather per micro-batch."""

    @property
    def layers_per_unit(self) -> int:
        return int(self.options.unit)

    def prefetch_depth(self, forward: bool, sizes: Sequence[int]) -> int:
        if not forward and not self.options.backward_prefetch:
            return 0
        return super().prefetch_depth(forward, sizes) if self.options.prefetch is None else self.options.prefetch

    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        return () if not self.options.reshard and self.shards_at_rest("parameters", param) else None

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        f, r = setting.n, setting.replicas
        weights, grads = setting.weight_bytes, setting.grad_bytes
        gathers = 2 if self.options.reshard else 1
        moved = (f - 1) / f * (gathers * weights + grads) + 2 * (r - 1) / r * grads / f
        yield ClosedForm(
            "sent_per_step", setting.batches * moved, "arXiv 1910.02054, section 7.2.2: 3 times the parameters"
        )
        if f > 1:
            kept = 0 if self.options.reshard else 2
            yield ClosedForm(
                "state_bytes_per_parameter", 16 / f + kept, "section 2: 4 + 4 + 8 bytes, sharded fp32 weights"
            )
