"""The data on which decisions are based: observed pods, their messages, and the history in the status."""
