"""One replica's host memory: the shared region, and which chunks its rows hold."""
