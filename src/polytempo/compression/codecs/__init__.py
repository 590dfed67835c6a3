"""The codecs."""
