# SPDX-License-Identifier: Apache-2.0
"""Adapters to host systems: one folder per host. Installed as ``lmcache_ec.adapters``."""
