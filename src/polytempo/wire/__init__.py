"""Messages between processes and hosts: frames, keys, mailboxes over ZeroMQ, tensors in shared memory."""
