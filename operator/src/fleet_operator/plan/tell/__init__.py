"""The report of a decision: the status, its reasons, and the events."""
