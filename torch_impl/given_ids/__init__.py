"""Log-probabilities of given ids, and of the largest logits. Mirror of jax_impl/given_ids."""
