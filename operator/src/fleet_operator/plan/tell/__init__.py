"""Reports decisions: the status, the reasons in it, and the events."""
