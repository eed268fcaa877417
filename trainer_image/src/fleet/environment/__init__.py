"""The settings, apart from roles, that a job passes to its processes in environment variables."""
