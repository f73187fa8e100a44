"""Latent attention."""
