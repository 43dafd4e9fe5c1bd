"""Drafts that learn from the traffic of a real stack: `make demo-living`."""
