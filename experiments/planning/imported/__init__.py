"""Models that are no preset: the graph of a torch module as a layer graph, priced on a cluster."""
