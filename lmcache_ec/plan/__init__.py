# SPDX-License-Identifier: Apache-2.0
"""Estimates what caches of given sizes would save: replays a trace of requests over tiers."""
