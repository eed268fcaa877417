"""The local cluster, whose own kubelet runs the same pods as processes of this machine."""
