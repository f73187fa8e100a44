"""The file of settings: what options are where the command line does not say."""
