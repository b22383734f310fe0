"""What plugs compression into PyTorch's own parallelism: `ddp` for DistributedDataParallel, `fsdp` for FSDP2."""
