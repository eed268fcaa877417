"""The inputs of decisions: observed pods, their messages, and the memory in the status."""
