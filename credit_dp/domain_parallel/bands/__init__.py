"""Kernels: what one rank computes of an operation on the globe, from its band and the bands of all.

They are plain functions of local tensors, weights, settings and bands. Layers and the rules of
`band_tensor` call them.
"""
