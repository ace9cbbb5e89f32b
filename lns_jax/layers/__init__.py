"""Norms, schemes, attention, MLP and initialisers: what a block is made of."""
