"""What can be scanned."""
