"""The inputs of decisions: observed pods, their messages, and the history in the status."""
