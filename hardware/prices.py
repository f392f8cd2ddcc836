"""List prices of rented nodes: what a GPU costs an hour, by node of the catalog and region."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from meshcast.hardware.load import Sourced, Strict, catalog, catalog_model, load
from meshcast.hardware.schemas import Field, field_validator


class PriceOffer(Sourced):
    """The price of a node in a region.

    Attributes:
        node: of the catalog.
        region: as its seller calls it.
        value: for a GPU and hour.
    """

    node: str
    region: str
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    @field_validator("node")
    @classmethod
    def _check_node(cls, name: str) -> str:
        if name not in catalog("nodes"):
            raise ValueError("not in the catalog of nodes. See meshcast list nodes")
        return name


@catalog_model("prices")
class PriceList(Strict):
    """What a seller asks.

    Attributes:
        title: the seller, and how one buys.
        currency: of all prices.
        offers: by node and region.
    """

    name: str
    title: str
    currency: str = "USD"
    offers: tuple[PriceOffer, ...]


class NodePrice(NamedTuple):
    """What a GPU of a kind of node costs an hour, and who says so.

    Attributes:
        value: for a GPU and hour.
        source: in words, with the day on which it was read.
        currency: "" if it was not said.
    """

    value: float
    source: str
    currency: str = ""


def list_prices(node: str, lists: tuple[PriceList, ...] | None = None) -> list[NodePrice]:
    """Returns the prices of a kind of node, the lowest first. lists: of sellers; None: those of the catalog."""
    if lists is None:
        lists = tuple(load("prices", name) for name in catalog("prices"))
    offers = []
    for seller in lists:
        for offer in seller.offers:
            if offer.node == node:
                read = f", read {offer.checked}" if offer.checked else ""
                note = f", {offer.note}" if offer.note else ""
                words = f"{seller.title}, {offer.region}{read}{note} ({offer.source})"
                offers.append(NodePrice(offer.value, words, seller.currency))
    return sorted(offers, key=lambda price: price.value)
