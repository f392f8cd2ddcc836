"""Search for the best plan of a job, with a certificate: what the space holds, what bounds cut, what is proven."""
