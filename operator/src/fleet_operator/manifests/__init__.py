"""Reads manifest files as kubectl does, and reports every mistake in them."""
