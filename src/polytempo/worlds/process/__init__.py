"""The process world: operations of one real rank."""
