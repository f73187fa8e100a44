"""What drives a decoder token by token: the session."""
