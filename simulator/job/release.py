"""Releases of a framework: which month a release is of, and the traits that its code had then."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field

Month = Annotated[str, Field(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
"""A month as YYYY-MM, which sorts as text."""

DATE = re.compile(r"(20\d\d-(?:0[1-9]|1[0-2]))(?:-\d\d)?")
CONTAINER = re.compile(r"(\d\d)\.(0[1-9]|1[0-2])(?:\.\d+)?")
VERSION = re.compile(r"(?:core_)?[rv]?(\d+\.\d+)(?:\.\w+)?")


class FrameworkGeneration(BaseModel):
    """Traits that releases before a month had, where they differ from those of later ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    until: Month
    """First month whose releases no longer have them."""
    source: str = Field(min_length=10)
    """Commit, changelog or document that changed them, with its date."""
    set: dict[str, Any] = Field(min_length=1)
    """The traits, nested as in the profile."""


def find_month(release: str, versions: Mapping[str, str], where: str) -> str:
    """Returns the month YYYY-MM of a release.

    release: a month or day ("2023-06", "2023-06-28"), an NVIDIA container ("24.05"), or a version ("core_r0.8").
    versions: months of the framework's versions, by "major.minor".
    where: place of the release in the job, for error messages.
    Raises PlanError for any other text.
    """
    if (version := VERSION.fullmatch(release)) and version[1] in versions:
        return versions[version[1]]
    if date := DATE.fullmatch(release):
        return date[1]
    if container := CONTAINER.fullmatch(release):
        return f"20{container[1]}-{container[2]}"
    known = f", or a version from {min(versions, key=versions.__getitem__)} on" if versions else ""
    rule = "a release is a month (YYYY-MM), an NVIDIA container (YY.MM), or a version that the profile dates"
    raise PlanError(where, rule, f'Write its month, such as "2024-05"{known}', release)


def generations_of(
    generations: Sequence[Mapping[str, Any]], month: str, where: str = "generations"
) -> list[FrameworkGeneration]:
    """Returns the generations whose traits the releases of `month` have: the latest first, so that earlier ones win."""
    checked = [
        validate_data(FrameworkGeneration, dict(entry), f"{where}[{i}]", PlanError)
        for i, entry in enumerate(generations)
    ]
    return sorted((traits for traits in checked if month < traits.until), key=lambda traits: traits.until, reverse=True)
