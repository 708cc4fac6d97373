"""The default rules, derived and checked on simulated studies."""
