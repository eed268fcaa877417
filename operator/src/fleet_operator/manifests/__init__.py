"""Manifest files of FleetJobs: reading them as kubectl does, and finding every mistake in them."""
