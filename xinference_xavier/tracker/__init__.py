"""The supervisor's side: which replica of a model holds which chunks. No torch, no vLLM."""
