"""Benchmarks that compare fleet with alternatives, in one run on the same machine."""
