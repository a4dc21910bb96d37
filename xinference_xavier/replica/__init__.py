"""One replica beside its engine: a background thread of the engine's process, without vLLM."""
