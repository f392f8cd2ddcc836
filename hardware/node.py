"""A node: GPUs in one chassis, the links between them, and the network ports out of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, model_validator

from hardware.gpu import GPU
from hardware.link import Link
from hardware.load import Count, Strict, by_name, described


class ScaleUp(Strict):
    """How GPUs are joined at full speed.

    switched: every GPU can give its whole bandwidth to any one other; without a switch a pair shares one link.
    domain: GPUs so joined, where that is not the node (72 in a rack of 18 nodes of 4); None means the node.
    """

    link: Annotated[Link, BeforeValidator(by_name("links"))]
    switched: bool = True
    domain: Count | None = None


class NICs(Strict):
    """The ports of a node that carry training traffic (not those for storage).

    rail_optimised: the i-th port of every node hangs on the same switch.
    """

    link: Annotated[Link, BeforeValidator(by_name("links"))]
    count: Count
    rail_optimised: bool = False


@described("nodes")
class Node(Strict):
    """`gpus` GPUs of one type; `nics` is None for a node that stands alone."""

    name: str = "inline"
    title: str = ""
    gpu: Annotated[GPU, BeforeValidator(by_name("gpus"))]
    gpus: Count
    scale_up: ScaleUp
    nics: NICs | None = None
    note: str = ""

    @property
    def domain(self) -> int:
        """GPUs joined at full speed."""
        return int(self.scale_up.domain or self.gpus)

    @model_validator(mode="after")
    def _nested(self) -> Node:
        # Rank r lives in node r // gpus and in domain r // domain: one must be made of whole ones of the other.
        if self.domain % int(self.gpus) and int(self.gpus) % self.domain:
            raise ValueError(
                f"a scale-up domain of {self.domain} GPUs and a node of {int(self.gpus)} do not nest."
                " One must be a multiple of the other"
            )
        return self
