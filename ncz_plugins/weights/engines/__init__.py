"""Doors for inference engines, which load weights by the names and shapes of a Hugging Face checkpoint.

- `checkpoint.py`: the weights that an engine loaded last, in host memory.
- `vllm_plugin.py`: tells vLLM about the next one, without importing it.
- `vllm.py`: a weight transfer engine of vLLM.
- `verl.py`: a checkpoint engine of verl.
- `sglang.py`: a weight loader of SGLang.

Nothing here is imported before its engine is. See docs/guides/rl.md.
"""
