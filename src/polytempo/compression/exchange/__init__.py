"""How encoded tensors travel and become one."""
