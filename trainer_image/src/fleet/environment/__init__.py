"""The settings that a job passes to its processes in environment variables, except roles."""
