"""Exponential families in natural parameters: product is addition, cavity is subtraction."""
