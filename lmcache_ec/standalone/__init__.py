# SPDX-License-Identifier: Apache-2.0
"""The tiers within one process, without an engine or a store process: for programs, and for LMCache's storage plugin.

`tiers.py` opens a stack of tiers and has it surveyed; `writes.py` writes entries to it from copies in buffers of
`scratch.py`. `cache.py`, the public `lmcache_ec.Cache`, and adapters/lmcache build on these. `tensor.py` converts
arrays and tensors to bytes and back; `layout.py` handles the shape in an entry's header.
"""
