"""The policies as functions of the observed state, one module for each policy."""
