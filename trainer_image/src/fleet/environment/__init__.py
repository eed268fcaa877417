"""What a job tells its processes in their environment, beside their roles."""
