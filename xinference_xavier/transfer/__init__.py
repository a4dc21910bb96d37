"""The transfer process, which moves rows between the pools of two replicas."""
