"""Tables and figures of the paper, one command each. See experiments/reproduce.py."""
