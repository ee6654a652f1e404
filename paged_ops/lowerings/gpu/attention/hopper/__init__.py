"""Attention kernels for Hopper (sm_90), in Gluon: TMA loads, warp specialisation, wgmma."""
