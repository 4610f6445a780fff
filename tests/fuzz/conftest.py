# SPDX-License-Identifier: Apache-2.0
"""`make fuzz` runs these tests with this profile, repeatedly."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
