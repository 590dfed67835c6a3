"""Who holds the parameters? A parameter server: its rules, shards, copies, clients, all without I/O."""
