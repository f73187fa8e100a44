"""The completion scripts of bash, zsh and fish, and what they ask while somebody types."""
