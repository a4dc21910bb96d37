"""The supervisor's side: which replica of a model holds which chunks. Without torch and vLLM."""
