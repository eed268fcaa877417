"""What a job passes to its processes in environment variables, apart from their roles."""
