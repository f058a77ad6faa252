"""Several processes are one: DDP, FSDP2, accumulated gradients, torchrun."""
