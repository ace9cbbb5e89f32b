"""lns_jax: train language models with any norm placement, and see what their depth does."""
