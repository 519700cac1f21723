"""Log-probabilities of given ids, and of the largest logits. Mirror of torch_impl/given_ids."""
