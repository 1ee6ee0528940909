"""How often hypothesis tries a property: few times by day, as often as it says with `--hypothesis-profile=full`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

DAY, FULL = 20, 100
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]

# No deadline: an example that took long was interrupted by another process as a rule.
settings.register_profile("day", max_examples=DAY, deadline=None, suppress_health_check=CHECKS)
settings.register_profile("full", max_examples=FULL, deadline=None, suppress_health_check=CHECKS)


def examples(full: int, day: int = DAY) -> int:
    """Of a test that names its own number: the smaller one by day. Asked when a test module is imported."""
    return full if settings().max_examples >= FULL else min(full, day)
