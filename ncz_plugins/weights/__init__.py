"""Versions of a model's weights as patches: bytes that turn one version into the next, exactly.

- `boxes.py`: parts of tensors, and how they are cut into frames.
- `elements.py`, `forms.py`: elements in numpy arrays; what tensors are, and what is held of one.
- `strict.py`, `head.py`: JSON that is read with care; the first bytes of a patch.
- `index.py`: the list of a patch's tensors, checked before anything is decoded.
- `keys.py`: keyed checksums of patches.
- `threads.py`: work on frames in threads.
- `make.py`: makes a patch of what a rank holds.
- `apply.py`: reads the patches of all ranks, decodes their frames, and makes the tensors of a new version.
- `tensors.py`: what a rank holds of each tensor of a state dict.
- `state_dicts.py`: patches of state dicts: made, applied, and written into existing tensors.
- `files.py`: safetensors files, and patches between them.
- `folders`: versions of checkpoints in folders, which any tool can sync.
- `sync.py`: a trainer that publishes versions, and workers that follow.
- `engines`: doors for inference engines.

Patches code and decode frames themselves, so this package imports `ncz_plugins.kernels` as well as `ncz_plugins.core`.
Import from the modules: only `tensors.py`, `state_dicts.py`, `sync.py` and `engines` need torch.
"""
