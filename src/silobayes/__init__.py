"""silobayes: one posterior from many silos, with a privacy guarantee you can check."""

__version__ = "0.1.0"
