"""What torch.compile and torch.func see of a call."""
