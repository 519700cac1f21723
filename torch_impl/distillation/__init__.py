"""Divergences from a teacher's head, from sparse and from dense targets. Mirror of jax_impl/distillation."""
