"""The options of a sweep: of `meshcast.sweep`, and of ``meshcast sweep``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from meshcast.experiments.options import Options, option, place_of
from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import ValidationInfo, field_validator, model_validator


class SweepOptions(Options):
    """Options of a sweep, as `meshcast.sweep` describes them."""

    workers: Annotated[
        int | None, option("--workers", "Number of processes; one per core if not given.", "N", min=1)
    ] = None
    on: Annotated[
        str | None, option("--on", "Run on the workers of this Dask scheduler instead.", "dask://HOST:PORT")
    ] = None
    restart: Annotated[bool, option("--restart", "Discard the results of an earlier sweep at --out.")] = False

    @field_validator("workers", mode="before")
    @classmethod
    def _check_workers(cls, workers: Any, info: ValidationInfo) -> Any:
        if isinstance(workers, int) and workers < 1:
            remedy = "Write 1 or more, or None for one a core"
            raise PlanError(place_of(info), "at least one process forecasts", remedy, workers)
        return workers

    @field_validator("on", mode="before")
    @classmethod
    def _check_address(cls, on: object, info: ValidationInfo) -> object:
        if isinstance(on, str) and re.fullmatch(r"dask://\S+:\d{1,5}", on) is None:
            remedy = "Write dask://host:8786, as `dask scheduler` prints it after tcp://"
            raise PlanError(place_of(info), "a cluster is the address of a Dask scheduler", remedy, on)
        return on

    @model_validator(mode="after")
    def _check_together(self, info: ValidationInfo) -> Self:
        if self.workers is not None and self.on is not None:
            workers, on = place_of(info, "workers"), place_of(info, "on")
            raise PlanError(workers, "a cluster has its own workers", f"Leave out {workers} or {on}", self.workers)
        return self
