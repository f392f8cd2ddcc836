"""Colossal-AI Gemini: states in chunks that are sharded over ranks, and move between a rank's GPU and its host.

Weights are packed into chunks in the order of their use. A chunk is all-gathered when its first weight is used, and its
shard copied from the host before, if it lies there; gradients are reduce-scattered chunk by chunk, and copied to the
host where their optimizer states lie. GPU and host update the states that they hold at once. The `static` placement has
a fraction of the states on the host. With `auto` all optimizer states are there, but for the share `gpu_margin` of what
a warm-up step leaves free, and as many weights as do not fit in 0.9 of the memory beside what passes use at most.

    memory-in    shard 2   shard 3                   shard 2
    data         gather 1   gather 2   gather 3      gather 2   gather 1    reduce-scatter 3 ..
    compute                 chunk 1    chunk 2       chunk 3    chunk 2     chunk 1
    memory-out                                                              gradients 3 ..     | host: Adam of f_o

N ranks send 3 a (N-1)/N M bytes each, as ZeRO stage 3, for M bytes of weights and of gradients and a micro-batches. The
link to the host carries a (2 f_p + f_o) M/N bytes for the passes and f_o (1 - f_p) M/N after the update, f_o and f_p
the fractions of optimizer states and weights there; a GPU keeps (2 (1 - f_p) + 14 (1 - f_o)) / N bytes per parameter.

Not modelled: whole chunks on the host (of each the fraction is); chunks across layers, and padding; chunks that stay
gathered (`shard_param_frac`); gradients in the chunks of weights; copies of weights to the host, where they are pinned.

References: Li et al. 2021, arXiv 2110.14883; hpcaitech/ColossalAI, zero/gemini/placement_policy.py, gemini_ddp.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from meshcast.hardware.schemas import Field, model_validator
from meshcast.simulator.ir.capabilities import MeasuresMemory
from meshcast.simulator.ir.ops import Param
from meshcast.simulator.ir.scheme import ClosedForm, Paper, Scheme, SchemeOptions
from meshcast.simulator.schemes.data.shared.data_parallel import DataSetting
from meshcast.simulator.schemes.data.shared.fully_sharded import ShardedScheme
from meshcast.simulator.schemes.data.shared.gather_plan import GatheredModule, join_modules
from meshcast.simulator.schemes.data.shared.parameter_coordinator import fill_buckets

STEADY_SHARE = 0.9  # of the memory of a GPU is used (`steady_cuda_cap_ratio`)


class Gemini(ShardedScheme, MeasuresMemory):
    paper = Paper("arXiv:2110.14883", "Colossal-AI: A Unified Deep Learning System For Large-Scale Training", 2021)
    by_module = True
    updates_weights = False

    class Options(SchemeOptions):
        placement: Literal["static", "auto"] = "static"
        """static: the two fractions below. auto: by the memory that passes leave free."""
        offload_optim_frac: float = Field(default=0.0, ge=0, le=1)
        """Fraction of the optimizer states and gradients on the host."""
        offload_param_frac: float = Field(default=0.0, ge=0, le=1)
        """Fraction of the sharded weights on the host; only where all optimizer states are there."""
        gpu_margin: float = Field(default=0.0, ge=0, le=1)
        """Of auto: share of the free memory for optimizer states (`gpu_margin_mem_ratio`)."""
        chunk: int = Field(default=32 * 2**20, ge=1)
        """Least elements of a chunk; a larger matrix is a chunk by itself."""
        prefetch: int = Field(default=0, ge=0, le=16)
        """Chunks that are gathered ahead (`max_prefetch`)."""

        @model_validator(mode="after")
        def _check_fractions(self) -> "Gemini.Options":
            if self.placement == "static" and self.offload_param_frac and self.offload_optim_frac < 1:
                raise ValueError("weights move to the host behind all optimizer states: set offload_optim_frac: 1")
            return self

    @property
    def measures_memory(self) -> bool:
        return bool(self.options.placement == "auto")

    def place_states(self, memory: float, used: float, states: Mapping[str, float]) -> Scheme:
        weights, optimizer = states["parameters"], states["optimizer"] + states["gradients"]
        free = STEADY_SHARE * memory - used
        away = min(1.0, max(0.0, 1 - free / weights)) if weights else 0.0
        margin = self.options.gpu_margin * max(0.0, free - weights)
        kept = min(1.0, margin / optimizer) if optimizer else 0.0
        return self.with_options(placement="static", offload_optim_frac=1 - kept, offload_param_frac=away)

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        share = 1.0 if self.measures_memory else self.options.offload_optim_frac
        if state == "parameters":
            share = self.options.offload_param_frac
        return {"cpu": share} if share else {}

    def join_modules(self, modules: tuple[GatheredModule, ...]) -> tuple[GatheredModule, ...]:
        return join_modules(modules, self.options.chunk)

    def prefetch_depth(self, forward: bool) -> int:
        return int(self.options.prefetch * self.gathers_ahead)

    def gradient_buckets(self, params: Sequence[Param]) -> list[list[Param]]:
        return fill_buckets(params, self.options.chunk)

    def closed_forms(self, setting: DataSetting) -> Iterable[ClosedForm]:
        n = setting.n
        weights, optimizer = (self.offloaded_to(state).get("cpu", 0.0) for state in ("parameters", "optimizer"))
        moved = setting.batches * (2 * setting.weight_bytes + setting.grad_bytes)
        yield ClosedForm("sent_per_step", (n - 1) / n * moved, "arXiv 1910.02054, section 7.2.2: as ZeRO stage 3")
        kept = 2 * (1 - weights) + 16 * (1 - optimizer)
        yield ClosedForm("state_bytes_per_parameter", kept / n, "what is not on the host, with fp32 gradients")
