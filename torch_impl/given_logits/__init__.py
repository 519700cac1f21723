"""The loss on logits that exist already."""
