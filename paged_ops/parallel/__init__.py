"""One model on several devices, by torch.distributed."""
