"""The settings, except roles, that a job passes to its processes in environment variables."""
