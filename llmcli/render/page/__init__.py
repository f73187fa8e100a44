"""One-file pages for a browser: nothing is fetched, what is shown lies in the file."""

from llmcli.render.page.attention import AttentionPage, page_size
from llmcli.render.page.lens import lens_page, lens_page_size

__all__ = ["AttentionPage", "lens_page", "lens_page_size", "page_size"]
