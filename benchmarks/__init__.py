"""Benchmarks: each compares fleet with alternatives, in one run on the same machine."""
