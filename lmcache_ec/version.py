# SPDX-License-Identifier: Apache-2.0
"""The version of this package, as pyproject.toml has it."""

__version__ = "0.1.0"
