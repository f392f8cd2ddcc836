"""How many nodes, days and how much money a training needs: the smallest cluster of each kind of node."""
