"""Carries out plans on Kubernetes: reads from an informer cache, and writes to the API server."""
