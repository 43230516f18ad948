"""What the adapter does by FastDeploy's own variables."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from fdcache.errors import ConfigurationError
from fdcache.settings import Source, read_settings
from fdcache.settings.engine_model import AttentionBackend

logger = logging.getLogger(__name__)

_BACKEND, _MANAGER = "FD_ATTENTION_BACKEND", "ENABLE_V1_KVCACHE_MANAGER"


@dataclass(frozen=True, slots=True)
class EngineVariables:
    """FastDeploy's variables in force where the adapter was made."""

    keeps_preempted_output: bool
    frees_host_cache_asleep: bool

    @classmethod
    def load(cls) -> EngineVariables:
        """Read them. Raises ``SettingsError`` for settings that are wrong."""
        settings = read_settings().settings
        return cls(
            keeps_preempted_output=settings.scheduling.save_preempted_output,
            frees_host_cache_asleep=settings.engine_cache.clear_swap_space,
        )


def warn_of_old_manager() -> None:
    """Say so when FastDeploy runs its old cache manager beside the adapter, which it then does not call."""
    settings = read_settings().settings
    if not settings.engine_cache.v1_manager:
        logger.warning(
            "%s=0 (%s): FastDeploy uses its old cache manager, not this one, and write_through alone; set %s=1",
            _MANAGER,
            settings.place(_MANAGER),
            _MANAGER,
        )


def keeps_latents(latent_size: int) -> bool:
    """Return whether the attention backend keeps one latent for each token instead of keys and values.

    ``FD_ATTENTION_BACKEND`` decides where it is set, else the model does, whose latents have ``latent_size`` elements.
    Raises ``ConfigurationError`` for a backend that does not suit the model, or whose planes are not known.
    """
    settings = read_settings().settings
    backend, place = settings.attention.backend, settings.place(_BACKEND)
    if settings.source(_BACKEND) is Source.DEFAULT:
        return latent_size > 0
    if backend is AttentionBackend.DSA_ATTN:
        raise ConfigurationError(
            f"{_BACKEND}={backend} ({place}): its cache has planes for the indexer, which the configuration does not "
            "describe; give the adapter a layout of your own"
        )
    if backend is AttentionBackend.MLA_ATTN and not latent_size:
        raise ConfigurationError(
            f"{_BACKEND}={backend} ({place}): the model has no kv_lora_rank to keep latents of; unset {_BACKEND}"
        )
    return backend is AttentionBackend.MLA_ATTN


def is_preempted(request: Any) -> bool:
    """Return whether FastDeploy has preempted the request, by the name of its status."""
    return getattr(getattr(request, "status", None), "name", None) == "PREEMPTED"
