"""Training: loss, optimizer, step, loop, checkpoints, evaluation."""
