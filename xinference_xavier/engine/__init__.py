"""The vLLM side: the only part that imports vllm."""
