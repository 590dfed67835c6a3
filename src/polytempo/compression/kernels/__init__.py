"""Native kernels of codecs, by family: what `native/codes_*` does with their wires. The encodings are their oracle."""
