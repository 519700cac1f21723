"""LM heads of models from transformers: found, captured, patched."""
