"""The file of a compressed network: shared values, Huffman codes, bytes."""
