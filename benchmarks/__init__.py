"""What sharing costs, compared with what the machine can do: `python -m benchmarks`."""
