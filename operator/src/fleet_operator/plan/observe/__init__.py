"""What decisions are based on: observed pods, their messages, and the history in the status."""
