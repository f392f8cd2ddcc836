"""Recipes: what the published recipes of a program set, for a job that names the program and leaves it open.

The defaults of a program's code are its profile. Those who run it begin with a recipe, which sets more: what
overlaps, number formats, graphs, what is recomputed. Profiles list that under `recipe`, by release and by what a recipe
is for; a launch file says itself what it sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache, reduce
from typing import Any, Literal, NamedTuple

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field
from meshcast.simulator.job.framework import framework_recipe, merge_fields
from meshcast.simulator.job.plan_keys import PLAN_KEYS, keys_alike
from meshcast.simulator.job.release import Month
from meshcast.simulator.models.load import ModelSizes, find_preset_of_sizes, is_preset

NestedFields = dict[str, Any]
"""Fields of a framework, nested as in its profile, or keys of a plan in short form."""

SomeFields = Mapping[str, object]


Mixer = Literal["attention", "latent-attention", "state-space"]
"""What layers mix tokens with: `state-space` where some layers of a model do."""


class RecipeFacts(BaseModel):
    """What decides which settings of recipes a job gets.

    month: of its release; empty: the newest.
    model: its name.
    experts: whether it has experts.
    mixer: what its layers mix tokens with, see `Mixer`.
    gpu: name of its GPU.
    compute: format of its products.
    mode: which parameters it trains.
    degrees: of its plan, and under `domain` the GPUs of a scale-up domain.
    deterministic: whether kernels add in a fixed order.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    month: str = ""
    model: str = ""
    experts: bool = False
    mixer: Mixer = "attention"
    gpu: str = ""
    compute: str = ""
    mode: str = "full"
    degrees: dict[str, int] = {}
    deterministic: bool = False


class RecipeSetting(BaseModel):
    """What recipes of a program set, and where. A condition that is left out holds always."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    source: str = Field(min_length=10)
    """Repository, commit and file that set it."""
    since: Month | Literal[""] = ""
    """First month whose releases set it."""
    until: Month | Literal[""] = ""
    """First month whose releases no longer set it."""
    models: tuple[str, ...] = ()
    """Beginnings of the names of models, in small letters."""
    experts: bool | None = None
    """Whether the model has experts."""
    mixers: tuple[Mixer, ...] = ()
    """What the layers of the model mix tokens with."""
    gpus: tuple[str, ...] = ()
    """Names of GPUs."""
    compute: tuple[str, ...] = ()
    """Formats of the products of linear layers."""
    modes: tuple[str, ...] = ()
    """Which parameters are trained, as `train.mode` names it."""
    above: dict[str, int] = {}
    """Degrees of the plan, or GPUs of a scale-up `domain`, of which there must be more."""
    at_most: dict[str, int] = {}
    """Degrees of which there must not be more."""
    deterministic: bool | None = None
    """Whether kernels add in a fixed order."""
    set: NestedFields = {}
    """Traits of the framework, nested as in the profile."""
    plan: NestedFields = {}
    """Keys of a plan in short form."""

    def is_for(self, facts: RecipeFacts) -> bool:
        """Returns whether a job of these facts gets it."""
        last = facts.month or "9999-12"  # the newest release, which no longer has what ended
        degrees = facts.degrees
        return all(
            (
                self.since <= last < (self.until or "9999-99"),
                not self.models or facts.model.lower().startswith(self.models),
                not self.gpus or facts.gpu in self.gpus,
                not self.compute or facts.compute in self.compute,
                not self.modes or facts.mode in self.modes,
                not self.mixers or facts.mixer in self.mixers,
                self.experts in (None, facts.experts),
                self.deterministic in (None, facts.deterministic),
                all(degrees.get(name, 1) > least for name, least in self.above.items()),
                all(degrees.get(name, 1) <= most for name, most in self.at_most.items()),
            )
        )


class RecipeValue(NamedTuple):
    """A value that a job takes from recipes.

    key: of the job, without ``framework.set.``.
    source: of the recipe.
    """

    key: str
    value: object
    source: str


class Recipe(BaseModel):
    """The settings of recipes that a job gets, where it leaves them open. settings: later ones replace earlier ones."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    settings: tuple[RecipeSetting, ...] = ()

    @property
    def traits(self) -> NestedFields:
        """The traits of the framework that they set, nested as in the profile."""
        return reduce(merge_fields, (setting.set for setting in self.settings), {})

    @property
    def plan(self) -> NestedFields:
        """The keys of a plan in short form that they set."""
        return reduce(fill_plan, (setting.plan for setting in reversed(self.settings)), {})

    def leave_out(self, keys: Set[str]) -> Recipe:
        """Returns the recipe without what has these keys, which are those of `RecipeValue`."""
        if not keys:
            return self
        settings = []
        for setting in self.settings:
            traits = nest_traits((key, value) for key, value in _flatten(setting.set) if key not in keys)
            plan = {key: value for key, value in setting.plan.items() if f"plan.{key}" not in keys}
            settings.append(setting.model_copy(update={"set": traits, "plan": plan}))
        return Recipe(settings=tuple(settings))

    def list_taken(self, traits: SomeFields, plan: SomeFields) -> tuple[RecipeValue, ...]:
        """Returns what a job takes.

        traits: of the framework that it states.
        plan: as it states it.
        """
        taken, filled = dict[str, RecipeValue](), fill_plan(plan, self.plan)
        for setting in self.settings:
            for key, value in _flatten(setting.set):
                if _find(traits, key) is None:
                    taken[key] = RecipeValue(key, value, setting.source)
            for key, value in setting.plan.items():
                if plan.get(key) is None and filled.get(key) == value:
                    taken[f"plan.{key}"] = RecipeValue(f"plan.{key}", value, setting.source)
        return tuple(taken.values())


NO_RECIPE = Recipe()
"""The recipe of a job that names no program, or says everything itself."""


@cache
def recipe_settings(name: str) -> tuple[RecipeSetting, ...]:
    """Returns all settings of the recipes of a program, as its profile states them."""
    entries = enumerate(framework_recipe(name))
    return tuple(validate_data(RecipeSetting, entry, f"{name} recipe[{i}]", PlanError) for i, entry in entries)


def find_recipe(name: str, facts: RecipeFacts) -> Recipe:
    """Returns the settings of the recipes of a program that a job of these facts gets."""
    settings = tuple(setting for setting in recipe_settings(name) if setting.is_for(facts))
    return Recipe(settings=settings) if settings else NO_RECIPE


def name_as_recipes(program: str, name: str, sizes: ModelSizes) -> str:
    """Returns the name by which the recipes of a program know a model: its name, or that of the preset of its sizes."""
    known = _models_of_recipes(program)
    if not known or name.lower().startswith(known) or is_preset(name):
        return name
    return find_preset_of_sizes(sizes, known) or name


@cache
def _models_of_recipes(program: str) -> tuple[str, ...]:
    """Returns the beginnings of the names of all models that some recipe of a program is for."""
    return tuple(dict.fromkeys(model for setting in recipe_settings(program) for model in setting.models))


def name_mixer(*, latent: object, state_space: object) -> Mixer:
    """Returns what the layers of a model mix tokens with. latent, state_space: their sizes; None without any."""
    return "state-space" if state_space else "latent-attention" if latent else "attention"


def fill_plan(plan: SomeFields, defaults: SomeFields) -> NestedFields:
    """Returns a plan with defaults for what it leaves open; a plan in long form says everything itself.

    A key that states a scheme leaves no default to other keys that choose it, nor to its options.
    """
    if {"mesh", "schemes"} & plan.keys():
        return dict(plan)
    if not defaults:
        return dict(plan)
    stated = [PLAN_KEYS[key] for key, value in plan.items() if value is not None and key in PLAN_KEYS]
    closed = {name for key in stated for name in (key.name, *keys_alike(key.name))}
    chosen = {key.family for key in stated if key.chooses}
    options = {key.name for key in PLAN_KEYS.values() if "/" in key.owner and key.family in chosen}
    return {**plan, **{key: value for key, value in defaults.items() if key not in closed | options}}


def nest_traits(traits: Iterable[tuple[str, object]]) -> NestedFields:
    """Returns traits of the framework by dotted keys, nested as in the profile."""
    nested: NestedFields = {}
    for key, value in traits:
        *parents, last = key.split(".")
        inner = reduce(lambda fields, parent: fields.setdefault(parent, {}), parents, nested)
        inner[last] = value
    return nested


def _flatten(fields: SomeFields, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields nested fields by dotted keys."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _find(fields: object, key: str) -> object:
    """Returns a nested field; None if it is not there."""
    for name in key.split("."):
        fields = fields.get(name) if isinstance(fields, Mapping) else None
    return fields
