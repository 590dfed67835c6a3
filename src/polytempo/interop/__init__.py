"""Other libraries on Polytempo: a backend of torch.distributed, and hooks for DDP."""
