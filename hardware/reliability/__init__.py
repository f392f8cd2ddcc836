"""How often parts of a cluster fail, how long they are away, and how fast checkpoints reach a store."""
