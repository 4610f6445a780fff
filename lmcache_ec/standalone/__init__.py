# SPDX-License-Identifier: Apache-2.0
"""The tiers within one process, without an engine or a store process: for programs, and for LMCache's storage plugin.

`tiers.py` opens a stack of tiers and has it surveyed, `writes.py` carries entries into it from copies in buffers of
`scratch.py`. On these stand `cache.py`, which is the public `lmcache_ec.Cache`, and adapters/lmcache. `tensor.py` turns
arrays and tensors into bytes and back, `layout.py` has the shape in an entry's header.
"""
