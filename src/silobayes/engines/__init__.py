"""Where things run: in one process, or across machines."""
