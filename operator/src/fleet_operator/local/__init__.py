"""Carries out plans on this machine, where its own kubelet runs the same pods as processes."""
