"""State of a training from step to step: policies, error feedback, the guard, records and checkpoints.

state           `Training`: all of this state on one rank, saved with the model
group           state that all ranks of one process group have in common
policy          treatment of each part of a tensor: which quantizer, or plain
error_feedback  residuals: what quantizing loses of a gradient is added to the next one
rotation        bases that matrices are coded in, and what they are learnt from
muon            advice where the optimizer is Muon
guard           verification of some compressed sums against uncompressed ones
baseline        what ranks already have of a tensor that is sent again and again
records         a header and one record per step, from rank 0
metrics         where records go: JSON lines, TensorBoard, callables
report          the line that rank 0 prints about the share of compressed bytes
saved           validation of saved state
"""
