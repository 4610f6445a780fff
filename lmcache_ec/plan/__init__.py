# SPDX-License-Identifier: Apache-2.0
"""What caches of which sizes would save: a trace of requests, replayed over tiers."""
