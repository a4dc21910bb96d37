"""Which replica a request goes to: loads, forecasts, the choice, and the queue before it."""
