"""The control protocol between trainers and parameter servers: its service and its generated modules."""
