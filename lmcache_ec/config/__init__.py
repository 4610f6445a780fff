# SPDX-License-Identifier: Apache-2.0
"""The configuration of the encoder cache: LMCache's YAML file, environment and vLLM's extra configuration.

Later sources override earlier ones:

1. the file at `LMCACHE_CONFIG_FILE`: the map `ec:`, or keys `ec_<key>` beside it (in the order of the file)
2. the environment: `LMCACHE_EC_<KEY>`
3. vLLM's `ec_connector_extra_config`, where a credential is refused, because vLLM logs it

Places may be inherited, budgets never: `local_disk` of the KV part (file, or `LMCACHE_LOCAL_DISK`) serves here too, in
a folder of its own under it, and so does a `remote_url` that we have a tier for, with what belongs to it of
`extra_config`, unless one of the three names another or says `null`. All other keys of the file are LMCache's business.

`keys.py` says what there is, `lmcache_keys.py` what becomes of LMCache's own keys, `sources.py` reads the three,
`variables.py` fills in `${NAME}`, and `resolve.py` makes one configuration of them. Read once, at start, by each of the
engine's processes; nothing here has a thread.
"""

from lmcache_ec.config.keys import EncoderCacheConfig
from lmcache_ec.config.resolve import Resolved, load_config, resolve, summary
from lmcache_ec.config.sources import ConfigError, Origin, Source

__all__ = ["ConfigError", "EncoderCacheConfig", "Origin", "Resolved", "Source", "load_config", "resolve", "summary"]
