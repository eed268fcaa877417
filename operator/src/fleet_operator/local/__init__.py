"""Carries out plans on this machine: runs the same pods as processes, under its own kubelet."""
