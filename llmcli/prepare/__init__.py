"""What loading plans and reads ahead, before PyTorch is there."""
