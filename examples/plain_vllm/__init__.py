"""vLLM servers that share without xinference."""
