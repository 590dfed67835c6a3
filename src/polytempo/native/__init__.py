"""The native core from Python: its library, arenas, groups and messages. The C++ is in `native/` at the top."""
