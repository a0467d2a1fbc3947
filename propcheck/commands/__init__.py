"""One file a command: each reads its options, calls functions that can be imported, and prints what they return."""
