"""What people and programs are told of a decision: the status, its reasons and the events."""
