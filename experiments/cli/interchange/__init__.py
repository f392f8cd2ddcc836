"""What commands write for the tools of others: traces, memory snapshots, tables of nccl-tests."""
