"""Sources of streams: files, data sets and mixtures of them, in shards with known numbers of samples."""
