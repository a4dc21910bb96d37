"""The choice of a replica for each request: loads, forecasts, and the queue before it."""
