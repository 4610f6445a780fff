# SPDX-License-Identifier: Apache-2.0
"""What the cache costs, beside the floor, LMCache's encoder cache and vLLM's example connector. `make bench` runs it.

Each party is measured in a process of its own (`child.py`), which imports what that party imports in an engine and no
more. All take turns in every round, so that whatever else the machine does hits all alike; a ratio within one run can
be trusted further than any figure.
"""
