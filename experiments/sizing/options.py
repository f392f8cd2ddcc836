"""The options of a question of size: of `meshcast.size`, and of ``meshcast size``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Self

from meshcast.experiments.options import Options, option, place_of
from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field, ValidationInfo, field_validator, model_validator
from meshcast.simulator.job.counts import read_tokens

MOST_GPUS = 131_072
"""GPUs of the largest cluster that is looked at, unless stated."""


class SizeOptions(Options):
    """Options of a question of size, as `meshcast.size` describes them."""

    tokens: Annotated[
        float | None, option("--tokens", "Tokens to train on, e.g. 10T; of a job its own.", "N", reads=str)
    ] = None
    days: Annotated[float | None, option("--days", "Deadline, which 90% of simulated runs meet.", "N", reads=float)] = (
        None
    )
    budget: Annotated[float | None, option("--budget", "Most money, which 90% of them keep.", "MONEY", reads=float)] = (
        None
    )
    node: Annotated[
        tuple[str, ...],
        option("--node", "Kind of node, e.g. hgx-h200 or p5.48xlarge; repeatable.", "NAME"),
    ] = ()
    batch: Annotated[
        str | None, option("--batch", "Tokens of a step: 16M, or limits 4M..16M; of a job its own.", "N")
    ] = None
    most_gpus: Annotated[
        int, option("--most-gpus", "GPUs of the largest cluster to look at.", "N", min=1, max=1_000_000)
    ] = MOST_GPUS
    price: Annotated[tuple[str, ...], option("--price", "Price of a GPU and hour: hgx-h200=2.50.", "NODE=PRICE")] = ()
    prices: Annotated[
        Path | None,
        option("--prices", "YAML file of prices: NODE: PRICE, or like those of the catalog.", "FILE"),
    ] = None
    workers: Annotated[
        int | None, Field(ge=1), option("--workers", "Number of processes; one per core if not given.", "N", min=1)
    ] = None

    @field_validator("tokens", mode="before")
    @classmethod
    def _read_tokens(cls, value: Any, info: ValidationInfo) -> Any:
        read = read_tokens(value)
        try:
            number = math.nan if read is None else float(read)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if read is not None and not 0 < number <= 1e20:
            raise PlanError(place_of(info), "it is a number of tokens", "Write 10T, or 300B", value)
        return None if read is None else number

    @field_validator("days", "budget")
    @classmethod
    def _check_positive(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not 0 < value < 1e15:
            raise PlanError(place_of(info), "it is a number above 0", "Write 60", value)
        return value

    @model_validator(mode="after")
    def _check_question(self, info: ValidationInfo) -> Self:
        if self.days is None and self.budget is None:
            rule = "neither a deadline nor a budget is stated"
            raise PlanError("size", rule, f"Write {place_of(info, 'days')} 60, {place_of(info, 'budget')} 5e6 or both")
        return self
