"""Laws that hold for every scheme, and what counts and follows the data of a step for them."""
