"""The report of a decision: the status, the reasons in it, and the events."""
