"""One paper per file, both roles in it, as pure state transitions."""
