# SPDX-License-Identifier: Apache-2.0
"""How others plug in: one folder a host. Installed as ``lmcache_ec.adapters``."""
