"""Parts of traces: names and arguments of kernels, threads and launches, memory as a snapshot of torch."""
