"""The process that requests come through: it knows all replicas of a model and chooses one."""
