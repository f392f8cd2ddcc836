"""What a few schemes can do beyond what every scheme does: a small base class for each ability.

A scheme derives from the classes of its abilities; a room asks for the schemes that have an ability:
``schemes_with(plan.schemes, MeasuresMemory)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

from meshcast.simulator.ir.derived_units import DerivedUnits
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.ir.ops import Param, Work
from meshcast.simulator.ir.scheme import Scheme

Capability = TypeVar("Capability", bound=Scheme)


def schemes_with(schemes: Iterable[Scheme], capability: type[Capability]) -> list[Capability]:
    """Returns the schemes that have a capability, outermost first."""
    return [scheme for scheme in schemes if isinstance(scheme, capability)]


class DividesSequences(Scheme):
    """Divides sequences of several documents among ranks as a whole, so that some ranks may have more pairs."""

    @abstractmethod
    def with_skew(self, skew: float) -> Self:
        """Returns the scheme for sequences whose most loaded rank has so many times the mean of pairs."""


class ChangesWholeUnits(Scheme):
    """`lower` changes units alone, whose modules are lowered as without the scheme."""


class HoldsStates(Scheme):
    """Says where parameters, gradients and optimizer states lie."""

    updates_weights: ClassVar[bool] = True
    """Whether sharded weights are the main weights of the optimizer; otherwise it holds a separate copy."""

    def offloaded_to(self, state: str) -> Mapping[str, float]:
        """Returns the offloaded shares of `state` by place: memory of the host (``cpu``) or its disks (``nvme``)."""
        return {}


class ShardsStates(HoldsStates):
    """Reduces gradients, and may shard states: a data scheme."""

    shards: ClassVar[tuple[str, ...]] = ()
    """States that are sharded: optimizer, gradients, parameters."""
    divides_while_loading: ClassVar[bool] = False
    """Weights of a layer are divided as they are loaded (``zero.Init`` of DeepSpeed)."""

    @cached_property
    def derived_units(self) -> DerivedUnits:
        """Units with what it adds to them: stages, and plans with other numbers of chunks, have the same."""
        return DerivedUnits()

    @property
    @abstractmethod
    def replica_axes(self) -> tuple[str, ...]:
        """Axes along which states are replicated, also those that are sharded over its other axes."""

    @property
    @abstractmethod
    def gathered_axes(self) -> tuple[str, ...]:
        """Axes over which it shards all weights between their passes, and gathers them as it says itself."""

    @property
    @abstractmethod
    def unit_key(self) -> Hashable:
        """A key that is equal for schemes under which units lower to the same ops before a whole stage is lowered."""

    @abstractmethod
    def reduces(self, param: Param) -> tuple[str, ...]:
        """Returns the axes over which it reduces the gradient of `param`; over other axes the update reduces it."""

    @abstractmethod
    def shards_at_rest(self, state: str, param: Param) -> tuple[str, ...]:
        """Returns the axes over which `state` (parameters, gradients, optimizer) of `param` is sharded in memory."""

    @abstractmethod
    def accumulation_shards(self, param: Param) -> tuple[str, ...]:
        """Returns the axes over which the gradient of `param` is sharded while micro-batches add to it."""

    @abstractmethod
    def update_shards(self, param: Param) -> tuple[str, ...]:
        """Returns the axes over which the update of `param` is sharded."""


class ConvertsWeights(ShardsStates):
    """Keeps main weights alone, also of parameters that no other rank has, and converts these for their passes."""

    @property
    @abstractmethod
    def converts(self) -> bool:
        """Whether it does so: where it is over several ranks."""


class UpdatesMatrices(ShardsStates):
    """Lets replicas share the update of whole matrices, for optimizers that treat a matrix as one."""


class KeepsOwnStates(Scheme):
    """Keeps states that are neither weights, gradients nor moments, for example the error of a compressed reduction."""

    @abstractmethod
    def own_states(self, param: Param) -> Mapping[str, float]:
        """Returns the bytes of these states of `param` on a rank, by place (gpu, cpu, nvme)."""


class KeepsSecondaryShards(Scheme):
    """Keeps a secondary copy of sharded weights, in the compute format."""

    @abstractmethod
    def secondary_shards(self, param: Param) -> tuple[str, ...] | None:
        """Returns the axes over which the copy of `param` is sharded; None: there is no copy of it."""


class HoldsBuffers(Scheme):
    """Has buffers that live through the whole step."""

    @abstractmethod
    def buffer_bytes(self, job: Any) -> int:
        """Returns the bytes of the buffers on every rank."""


class PredictsWeights(Scheme):
    """Runs passes on weights that it predicts from the newest ones, beside which it holds them."""

    @property
    @abstractmethod
    def predicts_weights(self) -> bool:
        """Whether its ranks make it do so."""


class KeepsBuckets(Scheme):
    """Reduces gradients in buckets that stay beside the gradients themselves."""

    @abstractmethod
    def keeps_bucket(self, param: Param) -> bool:
        """Returns whether the gradient of `param` has a place in a separate bucket."""


class HoldsUnequalShards(Scheme):
    """Gives ranks of several kinds shards of states of unequal size."""

    @abstractmethod
    def shard_sizes(self, axis: str, memory: Sequence[float]) -> Sequence[float] | None:
        """Returns the relative sizes of the shards of the ranks of each kind along an axis; None: all are equal.

        memory: of the GPUs of each kind [bytes].
        """

    @abstractmethod
    def with_shards(self, axis: str, largest: float, size: float) -> Scheme:
        """Returns the scheme on ranks whose shards along `axis` are `size` times the mean, the largest `largest`."""

    @abstractmethod
    def shard_size(self, axes: Sequence[str]) -> float:
        """Returns the size of its ranks' shards over `axes`, over that of equal shards."""


class MeasuresMemory(Scheme):
    """Finds out in a warm-up step how much memory states may take."""

    @property
    @abstractmethod
    def measures_memory(self) -> bool:
        """Whether a warm-up step decides where states lie; otherwise its options do."""

    @abstractmethod
    def place_states(self, memory: float, used: float, states: Mapping[str, float]) -> Scheme:
        """Returns the scheme with states where a warm-up step finds room for them.

        memory: of a GPU [bytes].
        used: peak of what is not states in the warm-up step [bytes].
        states: bytes of parameters, gradients and optimizer state of a rank, wherever they lie.
        """


class MeetsPeriodically(ShardsStates):
    """Lets ranks take steps alone, without gradient reduction, until they meet at the end of a period."""

    @property
    @abstractmethod
    def period(self) -> int:
        """Steps from a run of its periodic ops (`Op.when`) to the next."""

    @property
    @abstractmethod
    def unsynchronised_axes(self) -> tuple[str, ...]:
        """Axes along which ranks take steps alone."""


class AccumulatesByUnit(Scheme):
    """Runs all micro-batches of a step through a unit before the next unit."""

    @property
    @abstractmethod
    def accumulates_by_unit(self) -> bool:
        """Whether its options and ranks make it do so."""


class AnnotatesOperators(Scheme):
    """Has options that name, operator by operator, the dims that its axes shard.

    It says what ranks compute, so that its axes may also be those of a data scheme further out, which says where states
    rest. Equal collectives over several of its axes are a single collective.
    """

    @abstractmethod
    def check_operators(self, operators: Sequence[Operator], layers: int, where: str) -> None:
        """Raises PlanError if its options do not fit the operators of the model.

        layers: of the model.
        where: place of the scheme in the job.
        """

    @property
    @abstractmethod
    def layer_borders(self) -> tuple[int, ...]:
        """Numbers of the layers from which on it shards other dims than in the layers before."""


class PadsVocabulary(Scheme):
    """Pads the vocabulary to other ranks than all that it is over, as tensor schemes do."""

    @property
    @abstractmethod
    def vocabulary_axes(self) -> tuple[str, ...]:
        """Axes to whose ranks the vocabulary is padded."""


class GathersLogits(Scheme):
    """Shards the output layer along the vocabulary, and gathers the logits of a loss over the whole vocabulary."""


class TakesProjectedKeys(Scheme):
    """Shards a sequence although its keys and values are projected along it, which all ranks then have whole."""


class ChangesKernels(Scheme):
    """Has other kernels, which also a single rank runs."""


class AdaptsModel(Scheme):
    """Runs a model in another way than it is stated, for example with another capacity factor."""

    @abstractmethod
    def adapt_model(self, model: Any) -> Any:
        """Returns the model as the plan runs it."""


class TriesAlternatives(Scheme):
    """Tries several options at run time, as its system does, and keeps those of the fastest layer."""

    @abstractmethod
    def alternatives(self, job: Any) -> Sequence[Scheme]:
        """Returns the scheme with each of the options that it tries for a job; empty if its options say everything."""


class FitsModels(Scheme):
    """Measures work on the cluster before training, and chooses by a model fitted to it."""

    @abstractmethod
    def fit_models(self, job: Any, measure: Callable[[Work], float]) -> Scheme:
        """Returns the scheme after its system has measured.

        measure: seconds of some work, alone on its rank.
        """


class VariesSteps(Scheme):
    """Has steps that differ from each other and are forecast in turn."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of these steps; 1: all steps are alike."""

    @abstractmethod
    def at_step(self, step: int) -> Scheme:
        """Returns the scheme in this step."""


class LowersByLayer(Scheme):
    """Changes stages, and may do the same with each of equal layers."""

    @property
    @abstractmethod
    def lowers_by_layer(self) -> bool:
        """Whether it does, whatever their number is."""


class AdaptsRecompute(Scheme):
    """Recomputes as many layers of every stage as its memory asks for."""

    @property
    @abstractmethod
    def adapts_recompute(self) -> bool:
        """Whether layers, and how many of them are recomputed, are chosen for every stage; otherwise options say it."""

    @abstractmethod
    def recompute_layers(self, count: int) -> Scheme:
        """Returns the scheme that recomputes so many layers of a stage."""


class ChoosesTensors(Scheme):
    """Lets some saved tensors of a stage leave it, where its memory is short."""

    @property
    @abstractmethod
    def chooses_tensors(self) -> bool:
        """Whether it is chosen for every stage which saved tensors leave it, and where to."""

    @property
    @abstractmethod
    def tensor_choices(self) -> Sequence[Any]:
        """What is stated to become of the saved tensors of every stage; empty: to be chosen."""

    @property
    @abstractmethod
    def memory_limit(self) -> float | None:
        """Memory of a device that its choices keep to [bytes]; None: that of the GPU."""

    @abstractmethod
    def with_tensors(self, choices: Sequence[Any], stage: int) -> Scheme:
        """Returns the scheme on a stage. choices: a `TensorChoice` for every stage."""


class RequiresRoles(Scheme):
    """Needs other schemes beside it."""

    required_roles: ClassVar[tuple[str, ...]]
    """Roles (`Scheme.role`) that other schemes of the plan must have."""
