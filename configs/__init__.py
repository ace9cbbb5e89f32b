"""Experiment configurations: `--config=NAME` finds them by name (lns_jax.cli)."""
