"""Other engines that run the same weights beside ours, where they are installed."""
