"""The door: the only place where values derived from rows become public."""
