"""Settings, other than roles, that a job passes to its processes in environment variables."""
