"""Local solvers: from rows or released statistics to a posterior."""
