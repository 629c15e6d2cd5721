"""Side-by-side measurements anyone can run: ``python -m benchmarks.hot_paths``, ``.attention``."""
