"""Command-line programs: thin absl mains over lns_jax."""
