"""Carries out plans on Kubernetes: reads come from an informer cache, writes go to the API server."""
