"""A published figure of a run, to compare the forecast with."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Published(BaseModel):
    """One figure of a run and its source: the key ``published`` of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    step_time_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tokens_per_s_per_gpu: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    tflops_per_gpu: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Model FLOP/s per GPU [TFLOP/s]."""
    mfu: float | None = Field(default=None, gt=0, le=1)
    flops: Literal["palm", "causal"] = "palm"
    """Convention of model FLOPs: ``palm`` counts attention in full, ``causal`` the half that the mask leaves."""
    source: str
    """Paper and table, or address of a page."""

    @model_validator(mode="after")
    def _one(self) -> Published:
        if len(self.figures) != 1:
            given = ", ".join(self.figures) or "none"
            raise ValueError(f"one figure of step_time_s, tokens_per_s_per_gpu, tflops_per_gpu, mfu; given: {given}")
        return self

    @property
    def figures(self) -> dict[str, float]:
        """The published figure by its name."""
        names = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def compare(self, forecast: dict[str, float]) -> dict[str, Any]:
        """The comparison with the forecast, as the answer holds it.

        forecast: all forecast figures by name. ``error`` is always that of the step time, forecast / published - 1;
        the error of a published rate is converted to it.
        """
        ((name, value),) = self.figures.items()
        ratio = forecast[name] / value
        return {
            "figure": name,
            "published": value,
            "forecast": forecast[name],
            "error": ratio - 1 if name == "step_time_s" else 1 / ratio - 1,
            "source": self.source,
        }
