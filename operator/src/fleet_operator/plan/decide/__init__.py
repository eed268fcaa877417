"""Policies as functions of the observed state, one module per policy."""
