"""The command `xinference-xavier`, with its subcommands in `commands`. Imports neither torch nor
vllm."""
