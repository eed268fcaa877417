"""The control protocol: the service between trainers and parameter servers, and its generated modules."""
