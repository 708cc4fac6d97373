"""Arguments in, calls out; no mathematics here."""
