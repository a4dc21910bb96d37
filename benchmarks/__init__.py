"""What sharing gains and costs, compared with what the machine can do: `python -m benchmarks`."""
