"""One replica's host memory: the shared region, and the book of what its rows hold."""
