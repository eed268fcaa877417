"""Measurements: each prints what it measured beside its rivals, in one run on the same machine."""
