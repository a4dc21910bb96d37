"""Copies between a KV cache and the pool, in vLLM's workers."""
