"""What codecs are made of: bits, blocks, entries, residuals."""
