"""Text into rows of tokens: sources, tokenizers, packing, preparation, the Grain pipeline."""
