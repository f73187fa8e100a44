"""The rungs: what each changes in the walk, or in the rung below."""
