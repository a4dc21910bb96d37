"""Moving rows between the pools of two replicas."""
