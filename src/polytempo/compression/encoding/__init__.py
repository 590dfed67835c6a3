"""Parts of codecs: bits, blocks, entries, residuals."""
