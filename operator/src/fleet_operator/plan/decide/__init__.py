"""Policies as functions of the observed state, one module for each."""
