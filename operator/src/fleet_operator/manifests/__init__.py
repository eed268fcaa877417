"""Manifest files: reads them as kubectl does, and reports every mistake in them."""
