"""The Kubernetes cluster, which reads from an informer cache and writes to the API server."""
