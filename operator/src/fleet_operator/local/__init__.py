"""Carries plans out on this machine: the same pods as processes, under a kubelet of its own."""
