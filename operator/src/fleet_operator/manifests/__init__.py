"""Manifest files of FleetJobs: reads them as kubectl does and finds all mistakes in them."""
