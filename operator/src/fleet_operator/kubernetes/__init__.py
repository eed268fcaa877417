"""A Kubernetes cluster: reads come from an informer cache, writes go to the API server."""
