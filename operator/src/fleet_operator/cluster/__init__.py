"""Where plans are carried out: an API server, or the processes of this machine."""
