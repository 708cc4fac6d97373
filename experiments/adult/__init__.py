"""Adult: all methods, three splits, 10 and 200 silos."""
