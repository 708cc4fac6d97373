"""The case study of Sharma's thesis: Bayesian linear regression in one dimension."""
