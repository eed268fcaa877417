"""Settings that every test shares."""

import os

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is; what it shows is the same. CI draws the same
# examples each time, so that a change is judged by what it changed.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
