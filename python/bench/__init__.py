"""Benchmarks that need Python; `maru bench data` runs them."""
