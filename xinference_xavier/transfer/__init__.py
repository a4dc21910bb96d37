"""The transfer process: moves rows between the pools of two replicas."""
