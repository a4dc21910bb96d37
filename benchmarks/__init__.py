"""What sharing costs, beside what the machine itself can do: `python -m benchmarks`."""
