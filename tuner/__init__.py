"""Search, measurement and emission of kernel configurations."""

__version__ = "0.1.0"
