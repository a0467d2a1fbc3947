"""Settings of a scan: the probe schema, its files and overrides, and what decides a scan's numbers."""
