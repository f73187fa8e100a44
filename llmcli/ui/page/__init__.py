"""One-file pages for a browser: nothing is fetched."""
