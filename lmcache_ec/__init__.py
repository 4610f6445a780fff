# SPDX-License-Identifier: Apache-2.0
"""A shape-agnostic cache of encoder outputs over memory, disk and remote stores.

This package imports no serving engine; importing it imports nothing else, so that the store process starts fast.
"""

__version__ = "0.1.0"
