"""Reading, generating and splitting rows."""
