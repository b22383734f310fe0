"""Tensors to frames and back: layout, quantization steps, frames of one tensor, tensors as bytes."""
