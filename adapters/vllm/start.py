# SPDX-License-Identifier: Apache-2.0
"""Runs as soon as vLLM knows its configuration: in the first process, before any weights are loaded."""

from __future__ import annotations

import difflib
import functools
import sys
from typing import Any

from .ours import NAME, is_ours
from .topology import why_inert


def install() -> None:
    """Check the cache's configuration where vLLM builds its own (`EngineArgs.create_engine_config`). Idempotent. An
    invalid one ends the start there, and the error is the last line of the log."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "_lmcache_ec"):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = original(self, *args, **kwargs)
        _check_name(vllm_config.ec_transfer_config)
        _check_manager(vllm_config)
        if is_ours(vllm_config):
            _begin(vllm_config)
        return vllm_config

    create_engine_config._lmcache_ec = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _check_name(transfer: Any) -> None:
    """ValueError if our name is misspelled: vLLM would report the unknown connector a minute later, in a worker."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    name = transfer.ec_connector if transfer is not None else None
    if name is None or name in ECConnectorFactory._registry or transfer.ec_connector_module_path is not None:
        return
    if difflib.get_close_matches(name.lower(), [NAME.lower()], cutoff=0.8):
        raise ValueError(f"ec_connector {name!r} in --ec-transfer-config: did you mean {NAME}?")


def _check_manager(vllm_config: Any) -> None:
    """ValueError for a `manager_config` that our encoder-cache manager would refuse after the weights are loaded.

    The manager is not imported here: an engine that does not name it does not load it.
    """
    manager = vllm_config.ec_manager_config
    if (manager.encoder_cache_manager_cls or "").startswith(f"{__package__}."):
        sys.modules[manager.get_encoder_cache_manager_obj().__module__].policy_of(manager.manager_config)


def _begin(vllm_config: Any) -> None:
    """ConfigError for an unusable configuration, an unreadable key, or a tier that refuses."""
    from lmcache_ec.config import ConfigError, load_config

    from .container import finish_before_exit

    config = load_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
    if not config.enabled:
        return
    config.signing_key()
    if _engine_is_here(vllm_config.parallel_config) and not why_inert(vllm_config):
        from lmcache_ec.opening_check import why_refused

        if problem := why_refused(config):
            raise ConfigError(problem)
    finish_before_exit(config.drain_s)


def _engine_is_here(parallel: Any) -> bool:
    """Whether an engine of this front end starts on this host. Credentials and disks may differ on other hosts."""
    return (
        parallel.data_parallel_size_local > 0
        and parallel.data_parallel_backend != "ray"
        and not parallel.node_rank_within_dp
    )
