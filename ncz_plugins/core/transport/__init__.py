"""Transports: what carries frames, agreements and uncompressed collectives between ranks.

The interface, and its implementations:

- base.py: the interface of all transports.
- gloo.py: the transport of tensors in host memory.
- nccl.py: the transport of tensors on a GPU.
- nccl_classes.py: torch's classes of NCCL groups.
- routes.py: the transport and device for the tensors on each torch device.

Connections:

- addresses.py: the address by which other ranks reach this host.
- connections.py: the connections between the ranks of one group.
- agreements.py: how ranks find a maximum over these, and compare what they are about to do.
- descriptors.py: whether this process may open enough file descriptors.
- endpoint.py: where a rank listens, and how ranks connect and say why they give up.
- handshake.py: how ranks meet, and the comparison of their configurations.
- mesh.py: messages over TCP connections of our own.
- mesh_stream.py: frames over these connections.

Uncompressed collectives:

- plain.py: by a process group of torch.distributed.
- small.py: of small tensors, over the connections of mesh.py.
- striped.py: large gathers and exchanges over several NCCL groups.
- subset.py: between some ranks of a group.

Ranks and nodes:

- comparison.py: whether all ranks hold the same numbers.
- groups.py: the process groups that users pass.
- intra_node.py: transfers between ranks of one node.
- process_memory.py: reading the memory of another process.
- topology.py: which ranks share a node or a machine.

Speed:

- gpu_speed.py: the speed of uncompressed calls on GPUs, measured.
"""
