"""The policies, as functions of the observed state, with one module for each policy."""
