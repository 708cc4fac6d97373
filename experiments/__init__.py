"""Experiments of the papers, run with the public surface of silobayes; see the README of each folder."""
