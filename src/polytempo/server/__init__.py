"""Parameters on servers: shards, their rules, workers, coordinator. A parameter server: its rules, shards, copies,
clients, all without I/O."""
