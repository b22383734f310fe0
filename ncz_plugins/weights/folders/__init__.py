"""Folders of versions: each version of a checkpoint is a directory, which any tool can list, sync and fetch.

    FOLDER/00000001/    a whole version: the files of a Hugging Face checkpoint, and version.json
    FOLDER/00000002/    changes: NAME.patch for each safetensors file NAME that has changed, and version.json

`version.json`, the manifest, names the files of the checkpoint with their sizes and SHA-256, and how each one is stored
(docs/reference/patch-format.md). A directory appears complete, by a rename, and never changes. Whatever a reader holds
is found by SHA-256, so any checkpoint may be where it starts.

- `manifest.py`: what a version consists of, checked.
- `copying.py`: files are hashed, copied and written.
- `checkpoint.py`: the files of a checkpoint that a publisher or a reader has on its disk.
- `versions.py`: the versions in a folder, and what each one is made of.
- `verify.py`: reads all files of versions, and lists them.
- `patched.py`: makes safetensors files from patches, and patches from safetensors files.
- `fetch.py`: makes the checkpoint of a version.
- `publish.py`: adds a version, and removes old ones.

Nothing here needs torch, which takes longer to import than a gigabyte to be hashed. Import from the modules.
"""
