"""HTTP: commands about prefixes and quotas, and where a prefix is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fdcache.errors import HashingError
from fdcache.service.client.control import Prefix
from fdcache.service.server.arguments import MAX_HASHES
from fdcache.service.wire.control_views import (
    DeleteView,
    MoveView,
    PinView,
    PrefetchView,
    QuotaView,
    UnpinView,
)
from fdcache.service.wire.views import ExplainView, NamedTenantView

PREFIX_PATHS = frozenset(f"/v1/{name}" for name in ("explain", "pin", "unpin", "prefetch", "move", "delete"))
"""Paths whose bodies have prompts."""

VIEWS = (
    DeleteView,
    ExplainView,
    MoveView,
    NamedTenantView,
    PinView,
    PrefetchView,
    QuotaView,
    UnpinView,
)


def _numbers(value: Any) -> Any:
    """Return a number or a list of them; texts and truth values are none. 1.0 is a whole number, as to JSON Schema."""
    every = value if isinstance(value, list) else [value]
    if not {type(each) for each in every} <= {int, float, type(None)}:
        raise ValueError("give numbers")
    return value


_NUMBERS = BeforeValidator(_numbers)
Whole = Annotated[int, Field(strict=False), _NUMBERS]
Token = Annotated[int, Field(strict=False, ge=0, lt=2**32)]
Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_MOST_TOKENS = 1 << 21


class PrefixOrder(BaseModel):
    """A prefix: its tokens, or the hashes of its blocks."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: Annotated[list[Token], Field(max_length=_MOST_TOKENS), _NUMBERS] | None = Field(
        None, description="The tokens of a prompt, of which whole blocks count."
    )
    hashes: Annotated[list[Hash], Field(max_length=MAX_HASHES)] | None = Field(
        None, description="The hashes of its blocks, in path order."
    )
    namespace: str | None = Field(
        None, pattern="^[0-9a-f]{1,16}$", description="Beginning of its name; needed if there are several."
    )
    tenant: str | None = Field(None, max_length=1000, description="The tenant that the tokens belong to.")
    adapter: str | None = Field(None, max_length=1000, description="The adapter that computes the tokens.")
    lookahead: Whole = Field(0, ge=0, le=64, description="FDCACHE_LOOKAHEAD_TOKENS of the engines.")

    @property
    def prefix(self) -> Prefix:
        """What the command line and clients name it by."""
        return Prefix(self.tokens, self.hashes, self.namespace, self.tenant, self.adapter, self.lookahead)


class PinOrder(PrefixOrder):
    """A prefix to keep in the host tier."""

    seconds: float = Field(300, gt=0, le=1e9, description="Time after which the pin ends.")
    most_blocks: Annotated[int, Field(strict=False, ge=1, lt=2**31), _NUMBERS] | None = Field(
        None, description="Blocks that the pin may hold."
    )


class PrefetchOrder(PrefixOrder):
    """A prefix to read into the host tier."""

    source: str | None = Field(
        None, max_length=300, description="Address of the node that is asked first: FDCACHE_STORAGE=nodes."
    )


class UnpinOrder(PrefixOrder):
    """A pin to end: by its number, or all of exactly this prefix."""

    pin: Annotated[int, Field(strict=False, ge=1, le=2**53), _NUMBERS] | None = Field(
        None, description="Number of the pin."
    )


class DeleteOrder(PrefixOrder):
    """Blocks of a prefix to delete, with all that continue them."""

    start: Whole = Field(0, ge=0, lt=2**31, description="The first block to delete; those before it stay.")
    dry_run: bool = Field(False, description="Only count the blocks of the prefix.")


class QuotaOrder(BaseModel):
    """The share of each namespace that a tenant may have, until the service ends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: str = Field(min_length=1, max_length=1000, description="Name of the tenant.")
    share: float = Field(
        gt=0, le=1, description="Its share; FDCACHE_TENANT_QUOTAS keeps one for the next start."
    )


Returns = Callable[[Any, str], dict[int | str, dict[str, Any]]]
Ask = Callable[..., Any]


def add_control(views: APIRouter, commands: APIRouter, ask: Ask, returns: Returns) -> None:
    """Add the paths to the groups of views and of commands."""

    def about(order: PrefixOrder) -> dict[str, Any]:
        """Return the arguments of a question about a prefix."""
        if (order.tokens is None) == (order.hashes is None):
            raise HTTPException(409, "give tokens or hashes, one of the two")
        try:
            return order.prefix.arguments(ask)
        except HashingError as error:
            raise HTTPException(409, str(error)) from error

    @views.post("/v1/explain", responses=returns(ExplainView, "Where each block is."))
    def explain(order: PrefixOrder) -> dict[str, Any]:
        """Return where each block of a prefix is, or when and why it left."""
        return dict(ask("explain", **about(order)))

    @views.get("/v1/pins", responses=returns(list[PinView], "The pins in force."))
    def pins() -> list[dict[str, Any]]:
        """Return the pins in force."""
        return list(ask("pins"))

    @views.get("/v1/quotas", responses=returns(list[NamedTenantView], "Tenants."))
    def quotas() -> list[dict[str, Any]]:
        """Return the tenants with the most blocks, and the quota of each."""
        return list(ask("tenants"))

    @commands.post("/v1/pin", responses=returns(PinView, "What was pinned."))
    def pin(order: PinOrder) -> dict[str, Any]:
        """Keep the leading blocks of a prefix that are in the host tier there, for a time."""
        return dict(ask("pin", seconds=order.seconds, most_blocks=order.most_blocks, **about(order)))

    @commands.post("/v1/unpin", responses=returns(UnpinView, "Pins ended."))
    def unpin(order: UnpinOrder) -> dict[str, Any]:
        """End a pin, or all pins of exactly this prefix. One that is over already is no error: ``pins`` is 0 then."""
        if order.pin is None:
            return dict(ask("unpin", **about(order)))
        if order.tokens is not None or order.hashes is not None:
            raise HTTPException(409, "give a pin or a prefix, not both")
        return dict(ask("unpin", pin=order.pin))

    @commands.post("/v1/prefetch", responses=returns(PrefetchView, "What is being read."))
    def prefetch(order: PrefetchOrder) -> dict[str, Any]:
        """Begin to read what storage has of a prefix into the host tier; repeated, tell how far that is."""
        return dict(ask("prefetch", source=order.source, **about(order)))

    @commands.post("/v1/move", responses=returns(MoveView, "What is stored, and has left the host tier."))
    def move(order: PrefixOrder) -> dict[str, Any]:
        """Begin to move a prefix from the host tier to storage; repeated, tell how far that is."""
        return dict(ask("move", **about(order)))

    @commands.post("/v1/delete", responses=returns(DeleteView, "Blocks deleted."))
    def delete(order: DeleteOrder) -> dict[str, Any]:
        """Delete blocks of a prefix, and all that continue them, from the host tier and local storage."""
        return dict(ask("delete", start=order.start, dry_run=order.dry_run, **about(order)))

    @commands.post("/v1/quotas", responses=returns(QuotaView, "The quota."))
    def set_quota(order: QuotaOrder) -> dict[str, Any]:
        """Set the share of a tenant until the service ends."""
        return dict(ask("quota", tenant=order.tenant, share=order.share))
