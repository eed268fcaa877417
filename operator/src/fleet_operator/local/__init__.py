"""The local cluster, whose kubelet runs pods as processes on this machine."""
