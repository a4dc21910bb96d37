"""The command `xinference-xavier`; `commands` has them all. Imports neither torch nor vllm."""
