"""Whole models, as pure functions of (config, params, inputs)."""
