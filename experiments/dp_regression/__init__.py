"""Abalone and wine: private linear regression with and without projection (004 I, Figure 2)."""
