"""The rows of `bench` and of `bench compare`."""
