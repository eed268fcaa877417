"""The policies, one per module, as functions of the observed state."""
