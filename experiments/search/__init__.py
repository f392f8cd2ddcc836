"""Search of the best plan of a job, with a certificate: what the space holds, what bounds cut, how far the best plan can
be from the optimum."""
