"""The local cluster, whose kubelet runs each pod as a process on this machine."""
