# SPDX-License-Identifier: Apache-2.0
"""The version of this package; the wheel takes it from here."""

__version__ = "0.1.0"
