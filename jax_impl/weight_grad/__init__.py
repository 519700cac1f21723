"""Gradients as values: dW added to a buffer, and dW made later. In PyTorch these are options of the loss itself."""
