"""Codecs: from tensors to frames, which decode alone, and back.

- coded_tensor.py: the interface between schedules and codecs: `CodedTensor` and `Codec`.
- container.py: `compress` and `decompress`: one tensor as bytes that describe themselves.
- fixed_rate.py: the codec with a fixed number of bits for each value.
- from_config.py: the codec that a configuration asks for.
- gpu_codec.py: the quantizing codec for a GPU, which codes many frames in one launch.
- gpu_pieces.py: the same as pieces.py for GPUs, all pieces at once.
- layout.py: how a flat tensor is cut into segments and frames.
- pieces.py: the codec of pieces that ranks send each other, with quantization steps of their own.
- quantize.py: from a tensor's values to the quantization steps that all ranks share.
- tensor_codec.py: the codecs that write frames: quantized or lossless.
"""
