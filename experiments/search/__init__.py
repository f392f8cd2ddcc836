"""Search for the best plan of a job, with a certificate: what the space holds, what bounds cut, what is proven.

Its rooms, of which each imports those above it alone: `space`, the points that the open fields of a job span;
`frontier`, bounds of points and the search by them; `certificate`, what the search answers; `heterogeneous`, the search
of plans whose stages or replicas differ; `output`, what shows and stores the answer. The files of this folder open
searches of jobs.
"""
