# SPDX-License-Identifier: Apache-2.0
"""The configuration of the encoder cache: LMCache's YAML file, environment and vLLM's extra configuration.

Later sources override earlier ones:

1. the file at `LMCACHE_CONFIG_FILE`: the map `ec:`, or keys `ec_<key>` next to it (in the order of the file)
2. the environment: `LMCACHE_EC_<KEY>`
3. vLLM's `ec_connector_extra_config`, where a credential is refused, because vLLM logs it

Locations may be inherited, budgets never: `local_disk` of the KV part (file, or `LMCACHE_LOCAL_DISK`) is used here too,
with a separate folder under it, and so is a `remote_url` for which we have a tier, with its part of `extra_config`,
unless one of the three sources sets another or `null`. All other keys of the file belong to LMCache alone.

`keys.py` defines the keys, `lmcache_keys.py` handles LMCache's own keys, `sources.py` reads the three sources,
`variables.py` fills in `${NAME}`, and `resolve.py` combines them into one configuration. Read once, at start, by each
of the engine's processes; nothing here has a thread.
"""

from lmcache_ec.config.keys import EncoderCacheConfig
from lmcache_ec.config.resolve import Resolved, load_config, resolve, summary
from lmcache_ec.config.sources import ConfigError, Origin, Source

__all__ = ["ConfigError", "EncoderCacheConfig", "Origin", "Resolved", "Source", "load_config", "resolve", "summary"]
