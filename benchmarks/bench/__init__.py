# SPDX-License-Identifier: Apache-2.0
"""The cost of the cache, compared with the floor, LMCache's encoder cache and vLLM's example connector (`make bench`).

Each party is measured in its own process (`child.py`), which imports only what that party imports in an engine. The
parties take turns in every round, so that other load on the machine affects all of them alike; a ratio within one run
is more reliable than any absolute figure.
"""
