"""Builds the blocks of layers that go through sequences in order: Mamba, linear attention and convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.simulator.ir.decoder_operators import NormOfHeads
from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.linear_attention_operators import (
    BlockLinear,
    ChunkwiseLSTM,
    GatedDeltaRule,
    GatedNorm,
    LightningAttention,
    LinearMixer,
    LinearRecurrence,
    TokenShift,
    WeightedValues,
)
from meshcast.simulator.ir.mamba_operators import Convolution, Mamba, SelectiveScan, SSDScan
from meshcast.simulator.ir.modules import Module
from meshcast.simulator.ir.operators import Activation, Norm
from meshcast.simulator.models.parts import LinearAttention, StateSpace
from meshcast.simulator.models.shapes import Shapes


class RecurrentBuilder(Shapes):
    """Builds these blocks for a micro-batch of all replicas."""

    # ------------------------------------------------------------------------------------------- Mamba

    def mamba(self, ssm: StateSpace, x: Tensor, y: Tensor) -> Mamba:
        """Builds a Mamba-2 block from its input `x` [b, s, h] to its output `y` [b, s, h]: input projection,
        convolution and scan, gated norm if it has one, output projection.

        Heads and groups are sharded together: a rank has whole groups, with B and C for them. Sources: Dao and Gu
        2024 (arXiv 2405.21060), section 7 and figure 6; megatron/core/ssm/mamba_mixer.py of Megatron-Core.
        """
        heads = Dim(ssm.heads)
        inner = Dim(ssm.inner, unit=ssm.head_dim)
        shared = Dim(ssm.shared, unit=ssm.state)
        widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
        projected = tuple(self.act(f"ssm.{name}", a=width) for name, width in widths.items())
        weights = [self.weight(f"wssm.{name}", h=self.hidden_dim, a=width) for name, width in widths.items()]
        convolved = {name: widths[name] for name in ("x", "B", "C")}
        convolution = [
            *(self.weight(f"conv.{name}.weight", a=width, taps=Dim(ssm.conv)) for name, width in convolved.items()),
            *(self.weight(f"conv.{name}.bias", a=width) for name, width in convolved.items()),
        ]
        of_heads = [self.weight(name, a=heads) for name in ("A", "D", "dt.bias")]
        result = self.act("ssm.y", a=inner)
        modules: list[Module] = [
            *self.linear("in_proj", x, projected, *weights, whole=True),
            SSDScan("scan", projected, (result,), (*convolution, *of_heads), ssm.chunk, ssm.state),
        ]
        if ssm.norm:
            normed, scales = self.act("ssm.norm", a=inner), (self.weight("ssm.norm.weight", a=inner),)
            modules.append(Norm("gated_norm", (result,), (normed,), scales, modules=("norm",)))
            result = normed
        modules += self.linear("out_proj", result, (y,), self.weight("wssm.out", a=inner, h=self.hidden_dim))
        return Mamba("mamba", tuple(modules))

    def selective_mamba(self, ssm: StateSpace, x: Tensor, y: Tensor) -> Mamba:
        """Builds a Mamba-1 block from its input `x` [b, s, h] to its output `y` [b, s, h].

        Channels are sharded. The latent of dt, B and C are sums over all channels, and every rank needs them whole.
        """
        inner, state = Dim(ssm.inner), Dim(ssm.state)
        values, gate, convolved, result = (self.act(f"ssm.{name}", a=inner) for name in ("x", "z", "conv", "y"))
        weights = [self.weight(f"wssm.{name}", h=self.hidden_dim, a=inner) for name in "xz"]
        taps = self.weight("conv.weight", a=inner, taps=Dim(ssm.conv)), self.weight("conv.bias", a=inner)
        steps, read = self._project_steps(ssm, convolved)
        of_channels = self.weight("A", a=inner, n=state), self.weight("D", a=inner), self.weight("dt.bias", a=inner)
        return Mamba(
            "mamba",
            (
                *self.linear("in_proj", x, (values, gate), *weights, whole=True),
                Convolution("conv", (values,), (convolved,), taps),
                *steps,
                SelectiveScan("scan", (convolved, gate, *read), (result,), of_channels, ssm.state),
                *self.linear("out_proj", result, (y,), self.weight("wssm.out", a=inner, h=self.hidden_dim)),
            ),
        )

    def _project_steps(self, ssm: StateSpace, x: Tensor) -> tuple[list[Module], tuple[Tensor, ...]]:
        """Builds the projections of x to the latent of dt, B and C, their norms if they have some, and the projection
        of the latent to dt; returns also dt, B and C."""
        widths = {"latent": Dim(ssm.rank or 1), "B": Dim(ssm.state), "C": Dim(ssm.state)}
        shared = tuple(self.act(f"ssm.{name}", r=width) for name, width in widths.items())
        downs = [self.weight(f"wssm.{name}", a=x.dims["a"], r=width) for name, width in widths.items()]
        modules = self.linear("x_proj", x, shared, *downs, whole=True)
        if ssm.norm:
            raw, shared = shared, tuple(self.act(f"{tensor.name}.norm", r=tensor.dims["r"]) for tensor in shared)
            for before, after in zip(raw, shared, strict=True):
                scale = (self.weight(f"{after.name}.weight", r=after.dims["r"]),) if ssm.norm == "inputs" else ()
                modules.append(Norm(after.name, (before,), (after,), scale, modules=("norm",)))
        dt = self.act("ssm.dt", a=x.dims["a"])
        up = self.weight("wssm.dt", r=widths["latent"], a=x.dims["a"])
        return [*modules, *self.linear("dt_proj", shared[0], (dt,), up)], (dt, *shared[1:])

    # ---------------------------------------------------------------------------------- linear attention

    def linear_mixer(self, linear: LinearAttention, x: Tensor, y: Tensor) -> LinearMixer:
        """Builds linear attention from its input `x` [b, s, h] to its output `y` [b, s, h].

        Heads of keys and the heads of values that they serve are sharded together, with their rates and gates.
        """
        value = Dim(linear.value_width, unit=linear.value_width // linear.key_heads)
        builders = {
            **{"lightning": self._lightning, "short-conv": self._short_convolution},
            **{"mlstm": self._lstm, "rg-lru": self._recurrent_unit, "rwkv": self._weighted_values},
        }
        modules, result = builders.get(linear.kind, self._delta_net)(linear, x, value)
        return LinearMixer(
            "linear_attention",
            (*modules, *self.linear("out_proj", result, (y,), self.weight("wlinear.out", a=value, h=self.hidden_dim))),
        )

    def _delta_net(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds a delta rule with gates up to its output projection; returns also the input of that."""
        key = Dim(linear.key_width, unit=linear.key_dim)
        rate = Dim(linear.heads, unit=linear.heads // linear.key_heads)
        alpha = key if linear.kind == "kimi-delta" else rate
        widths = {"q": key, "k": key, "v": value, "beta": rate, "alpha": alpha, "z": value}
        projected = {name: self.act(f"linear.{name}", a=width) for name, width in widths.items()}
        rule_weights = [self.weight(f"conv.{n}.weight", a=widths[n], taps=Dim(linear.conv)) for n in "qkv"]
        rule_weights += [self.weight("A", a=rate), self.weight("dt.bias", a=alpha)]
        ruled, normed = self.act("linear.o", a=value), self.act("linear.norm", a=value)
        shape = linear.chunk, linear.key_dim, linear.value_dim
        scale = (self.weight("linear.norm.weight", d=Dim(linear.value_dim)),)
        direct = [name for name in projected if name not in linear.through_latents]
        weights = [self.weight(f"wlinear.{name}", h=self.hidden_dim, a=widths[name]) for name in direct]
        modules = self.linear("in_proj", x, tuple(projected[name] for name in direct), *weights)
        if linear.rank:
            through = tuple(projected[name] for name in linear.through_latents)
            modules += self._project_through_latents(x, Dim(linear.rank), through)
        z = projected.pop("z")
        return [
            *modules,
            GatedDeltaRule("delta_rule", tuple(projected.values()), (ruled,), tuple(rule_weights), *shape),
            GatedNorm("gated_norm", (ruled, z), (normed,), scale, modules=("norm",)),
        ], normed

    def _project_through_latents(self, x: Tensor, rank: Dim, results: tuple[Tensor, ...]) -> list[Module]:
        """Builds projections of x to `results`, each through a latent of its own."""
        latents = tuple(self.act(f"{result.name}.latent", r=rank) for result in results)
        downs = [self.weight(f"w{latent.name}", h=self.hidden_dim, r=rank) for latent in latents]
        modules = self.linear("latents.down", x, latents, *downs)
        for latent, result in zip(latents, results, strict=True):
            up = self.weight(f"w{result.name}", r=rank, a=result.dims["a"])
            modules += self.linear(f"{result.name}.up", latent, (result,), up)
        return modules

    def _short_convolution(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds a convolution between two gates up to its output projection; returns also the input of that."""
        names = tuple(linear.projections)
        in_gate, out_gate, v = projected = tuple(self.act(f"linear.{name}", a=value) for name in names)
        gated, convolved, result = (self.act(f"linear.{name}", a=value) for name in ("gated", "conv", "o"))
        weights = [self.weight(f"wlinear.{name}", h=self.hidden_dim, a=value) for name in names]
        taps = self.weight("conv.weight", a=value, taps=Dim(linear.conv))
        return [
            *self.linear("in_proj", x, projected, *weights, whole=True),
            Activation("linear.in_gate", (in_gate, v), (gated,)),
            Convolution("conv", (gated,), (convolved,), (taps,)),
            Activation("linear.out_gate", (out_gate, convolved), (result,)),
        ], result

    def _lstm(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds an LSTM with a matrix as memory up to its output projection; returns also the input of that."""
        key, rate = Dim(linear.key_width, unit=linear.key_dim), Dim(linear.heads)
        widths = {"q": key, "k": key, "v": value, "beta": rate, "alpha": rate, "z": value}
        projected = {name: self.act(f"linear.{name}", a=width) for name, width in widths.items()}
        weights = {name: self.weight(f"wlinear.{name}", h=self.hidden_dim, a=width) for name, width in widths.items()}
        gates = ("beta", "alpha")
        biases = [self.weight(f"blinear.{name}", a=rate) for name in gates]
        direct = [name for name in widths if name not in gates]
        result, normed, gated = (self.act(f"linear.{name}", a=value) for name in ("o", "norm", "gated"))
        shape = linear.chunk, linear.key_dim, linear.value_dim
        z = projected["z"]
        return [
            *self.linear("in_proj", x, tuple(projected[n] for n in direct), *(weights[n] for n in direct)),
            *self.linear("gates", x, tuple(projected[n] for n in gates), *(weights[n] for n in gates), *biases),
            ChunkwiseLSTM("lstm", tuple(projected[n] for n in widths if n != "z"), (result,), (), *shape),
            Norm("linear.norm", (result,), (normed,), (self.weight("linear.norm.weight", a=value),), modules=("norm",)),
            Activation("linear.gate", (normed, z), (gated,)),
        ], gated

    def _recurrent_unit(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds a recurrent unit behind a convolution up to its output projection; returns also the input of that."""
        branches = tuple(self.act(f"linear.{n}", a=value) for n in "vz")
        convolved, state, result = (self.act(f"linear.{name}", a=value) for name in ("conv", "o", "gated"))
        gates = tuple(self.act(f"linear.{name}", a=value) for name in ("in_gate", "decay"))
        weights = [self.weight(f"wlinear.{n}", h=self.hidden_dim, a=value) for n in "vz"]
        taps = self.weight("conv.weight", a=value, taps=Dim(linear.conv)), self.weight("conv.bias", a=value)
        blocks = [self.weight(f"w{gate.name}", a=value, d=Dim(linear.value_dim)) for gate in gates]
        biases = [self.weight(f"b{tensor.name}", a=value) for tensor in (*branches, *gates)]
        return [
            *self.linear("in_proj", x, branches, *weights, *biases[:2]),
            Convolution("conv", branches[:1], (convolved,), taps),
            BlockLinear("gates", (convolved,), gates, (*blocks, *biases[2:]), self.grad_dtype),
            LinearRecurrence("unit", (convolved, *gates), (state,), (self.weight("A", a=value),)),
            Activation("linear.act", (state, branches[1]), (result,)),
        ], result

    def mix_tokens(self, name: str, x: Tensor, words: Sequence[str]) -> tuple[Module, tuple[Tensor, ...]]:
        """Builds the mixtures of every token with that before it; returns also them, one for each of `words`."""
        mixed = tuple(self.act(f"{name}.mixed.{word}") for word in words)
        shares = tuple(self.weight(f"{name}.share.{word}", h=self.hidden_dim) for word in words)
        return TokenShift(f"{name}.shift", (x,), mixed, shares), mixed

    def _weighted_values(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds weighted sums of values (RWKV) up to their output projection; returns also the input of that."""
        shift, mixed = self.mix_tokens("linear", x, "kvr")
        k, v, receptance = (self.act(f"linear.{n}", a=value) for n in "kvr")
        summed, received = self.act("linear.o", a=value), self.act("linear.received", a=value)
        projections = [
            module
            for source, result in zip(mixed, (k, v, receptance), strict=True)
            for module in self.linear(
                result.name, source, (result,), self.weight(f"w{result.name}", h=self.hidden_dim, a=value)
            )
        ]
        decays = self.weight("decay", a=value), self.weight("first", a=value)
        return [
            shift,
            *projections,
            WeightedValues("wkv", (k, v), (summed,), decays),
            Activation("linear.receive", (summed, receptance), (received,)),
        ], received

    def _lightning(self, linear: LinearAttention, x: Tensor, value: Dim) -> tuple[list[Module], Tensor]:
        """Builds lightning attention up to its output projection; returns also the input of that."""
        projected, active = ([self.act(f"linear.{n}{end}", a=value) for n in "qkv"] for end in ("", ".act"))
        weights = [self.weight(f"wlinear.{n}", h=self.hidden_dim, a=value) for n in "qkv"]
        gate = self.act("linear.z", a=value)
        result, normed, gated = (self.act(f"linear.{name}", a=value) for name in ("o", "norm", "gated"))
        shape = linear.chunk, linear.key_dim, linear.value_dim
        scale = (self.weight("linear.norm.weight", a=value),)
        return [
            *self.linear("in_proj", x, tuple(projected), *weights),
            Activation("linear.act", tuple(projected), tuple(active)),
            LightningAttention("lightning", tuple(active), (result,), (), *shape),
            NormOfHeads("linear.norm", (result,), (normed,), scale, modules=("norm",)),
            *self.linear("output_gate", x, (gate,), self.weight("wlinear.z", h=self.hidden_dim, a=value)),
            Activation("linear.gate", (normed, gate), (gated,)),
        ], gated
