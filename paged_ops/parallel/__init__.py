"""One model on several devices, with torch.distributed."""
